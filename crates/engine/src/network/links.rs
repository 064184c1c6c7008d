//! Signed links: whoever has one reaches one port of one session until its time is over.
//!
//! ```text
//! EXPIRES-SIGNATURE        milliseconds since 1970 and a keyed BLAKE3, both in hexadecimal
//! ```

use crate::{Engine, Error, policy};
use model::{SessionId, Timestamp};
use std::time::Duration;

/// The longest that a link is good for.
const LONGEST: u64 = 30 * 24 * 3600;

impl Engine {
    /// A link to a port: its text, and when its time is over.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Deleted`]; [`Error::Invalid`] for a time that is too long.
    pub async fn sign_link(&self, id: SessionId, port: u16, seconds: u64) -> Result<(String, Timestamp), Error> {
        self.inner.present(id).await?;
        policy::seconds("seconds", Some(seconds))?;
        if seconds > LONGEST {
            return Err(Error::invalid("seconds", format!("it can be {LONGEST} (30 days) at most")));
        }
        if port == 0 {
            return Err(Error::invalid("port", "there is no port 0"));
        }
        let expires = self.inner.now().plus(Duration::from_secs(seconds));
        Ok((sign(self.inner.keyring.links(), id, port, expires), expires))
    }

    /// When the time of this link is over, where it is one to that port and good now.
    pub fn check_link(&self, id: SessionId, port: u16, link: &str) -> Option<Timestamp> {
        check(self.inner.keyring.links(), id, port, link, self.inner.now())
    }
}

fn signature(key: &[u8; 32], id: SessionId, port: u16, expires: Timestamp) -> blake3::Hash {
    blake3::keyed_hash(key, format!("preview {id} {port} {}", expires.0).as_bytes())
}

fn sign(key: &[u8; 32], id: SessionId, port: u16, expires: Timestamp) -> String {
    format!("{:x}-{}", expires.0, signature(key, id, port, expires).to_hex())
}

fn check(key: &[u8; 32], id: SessionId, port: u16, link: &str, now: Timestamp) -> Option<Timestamp> {
    let (expires, given) = link.split_once('-')?;
    let expires = Timestamp(i64::from_str_radix(expires, 16).ok()?);
    let given = blake3::Hash::from_hex(given).ok()?;
    // Compared in constant time: blake3::Hash says so.
    (given == signature(key, id, port, expires) && now < expires).then_some(expires)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_is_good_for_its_port_until_its_end() {
        let (key, id, expires) = ([7; 32], SessionId::new(), Timestamp(1_700_000_000_000));
        let link = sign(&key, id, 8080, expires);
        let before = Timestamp(expires.0 - 1);
        assert_eq!(check(&key, id, 8080, &link, before), Some(expires));
        assert_eq!(check(&key, id, 8080, &link, expires), None, "its time is over");
        assert_eq!(check(&key, id, 8081, &link, before), None);
        assert_eq!(check(&key, SessionId::new(), 8080, &link, before), None);
        assert_eq!(check(&[8; 32], id, 8080, &link, before), None);
        assert!(link.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-'));
    }

    #[test]
    fn a_link_that_was_changed_is_none() {
        let (key, id, expires) = ([7; 32], SessionId::new(), Timestamp(1_700_000_000_000));
        let link = sign(&key, id, 8080, expires);
        let now = Timestamp(1);
        for at in 0..link.len() {
            let mut bent = link.clone().into_bytes();
            bent[at] = if bent[at] == b'1' { b'2' } else { b'1' };
            assert_eq!(check(&key, id, 8080, std::str::from_utf8(&bent).unwrap(), now), None, "character {at}");
        }
        let longer = format!("{:x}-{}", expires.0 + 1, link.split_once('-').unwrap().1);
        for bad in [longer.as_str(), "", "-", "x-y", "1", &link[1..], &format!("-{link}")] {
            assert_eq!(check(&key, id, 8080, bad, now), None, "{bad}");
        }
    }
}
