//! Addresses that no name leads to: of this host, of private networks, and of special use.

use model::network::embedded;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// IPv4 blocks that only an address rule opens (IANA's special-purpose registry, and one cloud's metadata service).
const SPECIAL_V4: &[([u8; 4], u32)] = &[
    ([0, 0, 0, 0], 8),        // this network
    ([10, 0, 0, 0], 8),       // RFC 1918
    ([100, 64, 0, 0], 10),    // carrier-grade NAT
    ([127, 0, 0, 0], 8),      // loopback
    ([168, 63, 129, 16], 32), // Azure's host agent: public by form, metadata by use
    ([169, 254, 0, 0], 16),   // link-local, metadata services
    ([172, 16, 0, 0], 12),    // RFC 1918
    ([192, 0, 0, 0], 24),     // protocol assignments
    ([192, 88, 99, 0], 24),   // 6to4 relays
    ([192, 168, 0, 0], 16),   // RFC 1918
    ([198, 18, 0, 0], 15),    // benchmarks
    ([224, 0, 0, 0], 4),      // multicast
    ([240, 0, 0, 0], 4),      // reserved, broadcast
];

/// The same of IPv6, as first segments and their number of bits.
const SPECIAL_V6: &[(Ipv6Addr, u32)] = &[
    (Ipv6Addr::UNSPECIFIED, 127),                        // :: and ::1
    (Ipv6Addr::new(0x64, 0xff9b, 1, 0, 0, 0, 0, 0), 48), // local NAT64
    (Ipv6Addr::new(0x100, 0, 0, 0, 0, 0, 0, 0), 64),     // discard
    (Ipv6Addr::new(0x2001, 0, 0, 0, 0, 0, 0, 0), 32),    // Teredo: hides an IPv4 address
    (Ipv6Addr::new(0xfc00, 0, 0, 0, 0, 0, 0, 0), 7),     // unique local
    (Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0), 10),    // link-local
    (Ipv6Addr::new(0xfec0, 0, 0, 0, 0, 0, 0, 0), 10),    // site-local
    (Ipv6Addr::new(0xff00, 0, 0, 0, 0, 0, 0, 0), 8),     // multicast
];

/// The address and, where some router translates it, the IPv4 address that it stands for.
pub(super) fn forms(address: IpAddr) -> impl Iterator<Item = IpAddr> {
    let address = address.to_canonical();
    let inner = match address {
        IpAddr::V4(_) => None,
        IpAddr::V6(v6) => embedded(v6).map(IpAddr::V4),
    };
    std::iter::once(address).chain(inner)
}

/// Whether only an address rule opens this address. `own`: the addresses of the host's interfaces.
pub fn is_special(address: IpAddr, own: &[IpAddr]) -> bool {
    forms(address).any(|form| {
        own.contains(&form)
            || match form {
                IpAddr::V4(v4) => SPECIAL_V4
                    .iter()
                    .any(|(base, bits)| (v4.to_bits() ^ Ipv4Addr::from(*base).to_bits()).leading_zeros() >= *bits),
                IpAddr::V6(v6) => SPECIAL_V6.iter().any(|(base, bits)| (v6.to_bits() ^ base.to_bits()).leading_zeros() >= *bits),
            }
    })
}
