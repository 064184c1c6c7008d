//! Long lists in pages: what a page holds, and the mark from which the next one goes on.

use crate::StoreError;
use std::{fmt, str::FromStr};

/// The most items of one page; a greater limit counts as this one.
pub const MAX_PAGE: usize = 1000;

/// One page of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page<T> {
    pub items: Vec<T>,
    /// Where the next page begins; `None` at the end of the list.
    pub next_cursor: Option<Cursor>,
}

/// A place in a list. Opaque to clients: letters and digits only, fit for a URL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cursor(pub String);

/// Which list a cursor belongs to, so that one list's cursor isn't taken for another's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CursorKind {
    Sessions,
    Execs,
    Terminals,
    Snapshots,
    Events,
    Audit,
}

impl CursorKind {
    fn letter(self) -> char {
        match self {
            CursorKind::Sessions => 's',
            CursorKind::Execs => 'x',
            CursorKind::Terminals => 't',
            CursorKind::Snapshots => 'n',
            CursorKind::Events => 'e',
            CursorKind::Audit => 'a',
        }
    }
}

impl Cursor {
    /// The place after the item with this id.
    pub fn after_id(kind: CursorKind, id: impl fmt::Display) -> Cursor {
        let id = id.to_string();
        Cursor(std::iter::once(kind.letter()).chain(id.chars().filter(|c| *c != '-')).collect())
    }

    /// The place after the item with this number.
    pub fn after_number(kind: CursorKind, number: u64) -> Cursor {
        Cursor(format!("{}{number}", kind.letter()))
    }

    /// The id of [`Cursor::after_id`].
    ///
    /// # Errors
    /// [`StoreError::BadCursor`] for anything else.
    pub fn id<T: FromStr>(&self, kind: CursorKind) -> Result<T, StoreError> {
        let hex = self.0.strip_prefix(kind.letter()).ok_or(StoreError::BadCursor)?;
        if hex.len() != 32 || !hex.is_ascii() {
            return Err(StoreError::BadCursor);
        }
        let id = format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]);
        id.parse().map_err(|_| StoreError::BadCursor)
    }

    /// The number of [`Cursor::after_number`].
    ///
    /// # Errors
    /// [`StoreError::BadCursor`] for anything else.
    pub fn number(&self, kind: CursorKind) -> Result<u64, StoreError> {
        let digits = self.0.strip_prefix(kind.letter()).ok_or(StoreError::BadCursor)?;
        if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
            return Err(StoreError::BadCursor);
        }
        digits.parse().map_err(|_| StoreError::BadCursor)
    }
}

impl fmt::Display for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // A test fails by panicking.
    use super::*;
    use model::SessionId;

    #[test]
    fn a_cursor_reads_back_and_is_fit_for_a_url() {
        let id = SessionId::new();
        let cursor = Cursor::after_id(CursorKind::Sessions, id);
        assert!(cursor.0.bytes().all(|b| b.is_ascii_alphanumeric()), "{cursor}");
        assert_eq!(cursor.id(CursorKind::Sessions), Ok(id));
        assert_eq!(Cursor::after_number(CursorKind::Events, u64::MAX).number(CursorKind::Events), Ok(u64::MAX));
    }

    #[test]
    fn other_text_is_refused() {
        let other_list = Cursor::after_id(CursorKind::Execs, SessionId::new());
        assert_eq!(other_list.id::<SessionId>(CursorKind::Sessions), Err(StoreError::BadCursor));
        for bad in ["", "s", "s1", "é", "sééééééééééééééééé", "s0123456789abcdef0123456789abcdeg", "e1.0", "e", "e-1", "e+1"]
        {
            assert!(Cursor(bad.into()).id::<SessionId>(CursorKind::Sessions).is_err(), "{bad}");
            assert!(Cursor(bad.into()).number(CursorKind::Events).is_err(), "{bad}");
        }
    }
}
