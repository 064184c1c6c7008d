//! Blocks of addresses.

use std::{
    fmt,
    net::{IpAddr, Ipv6Addr},
    str::FromStr,
};

/// A block of IPv4 or IPv6 addresses. An IPv4-mapped block is one of IPv4.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cidr {
    base: IpAddr,
    bits: u8,
}

impl Cidr {
    /// The block of one address.
    pub fn of(address: IpAddr) -> Cidr {
        let base = address.to_canonical();
        Cidr { base, bits: width(base) }
    }

    /// Whether the address lies inside; an IPv4-mapped one counts as IPv4.
    pub fn contains(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        width(address) == width(self.base) && masked(address, self.bits) == self.base
    }
}

fn width(address: IpAddr) -> u8 {
    if address.is_ipv4() { 32 } else { 128 }
}

fn masked(address: IpAddr, bits: u8) -> IpAddr {
    match address {
        IpAddr::V4(v4) => IpAddr::V4((v4.to_bits() & u32::MAX.checked_shl(32 - u32::from(bits)).unwrap_or(0)).into()),
        IpAddr::V6(v6) => IpAddr::V6((v6.to_bits() & u128::MAX.checked_shl(128 - u32::from(bits)).unwrap_or(0)).into()),
    }
}

impl FromStr for Cidr {
    type Err = String;

    fn from_str(text: &str) -> Result<Cidr, String> {
        let (address, bits) = text.split_once('/').ok_or("a block is written ADDRESS/BITS")?;
        let address: IpAddr = address.parse().map_err(|_| "what stands before '/' is no address".to_owned())?;
        let number = bits.bytes().all(|b| b.is_ascii_digit()).then(|| bits.parse::<u8>().ok()).flatten();
        let mut bits = number
            .filter(|bits| *bits <= width(address))
            .ok_or_else(|| format!("what stands behind '/' is a number from 0 to {}", width(address)))?;
        let mut base = address;
        if let IpAddr::V6(v6) = address
            && let Some(v4) = v6.to_ipv4_mapped()
            && bits >= 96
        {
            (base, bits) = (IpAddr::V4(v4), bits - 96);
        }
        let base_masked = masked(base, bits);
        if base_masked != base {
            return Err(format!("bits are set behind the first {bits}: {base_masked}/{bits} is meant?"));
        }
        Ok(Cidr { base, bits })
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.base, self.bits)
    }
}

/// The IPv4 address that an IPv6 address stands for where some router translates: NAT64, 6to4 and the old compatible form.
pub fn embedded(address: Ipv6Addr) -> Option<std::net::Ipv4Addr> {
    let s = address.segments();
    let low = |high: u16, low: u16| std::net::Ipv4Addr::from(u32::from(high) << 16 | u32::from(low));
    match s {
        [0x64, 0xff9b, 0, 0, 0, 0, high, rest] => Some(low(high, rest)),
        [0x2002, high, rest, ..] => Some(low(high, rest)),
        [0, 0, 0, 0, 0, 0, high, rest] if high != 0 => Some(low(high, rest)),
        _ => None,
    }
}
