// SPDX-License-Identifier: Apache-2.0
//! `ip:port`, the only address that the library and its peers understand.

use std::fmt;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};

use crate::error::Error;

/// The longest endpoint, in bytes: the library's field less its terminator.
pub const MAX_BYTES: usize = 63;

/// A peer's numeric `ip:port`, NUL-terminated in place.
///
/// It is a value of fixed size, so that naming a peer allocates nothing and a
/// vendor batch can keep the name for as long as the library may read it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Endpoint {
    /// The text, then zeros up to the end.
    bytes: [u8; MAX_BYTES + 1],
}

impl Endpoint {
    /// An endpoint that names nobody; never given to the library.
    pub(crate) const EMPTY: Self = Self {
        bytes: [0; MAX_BYTES + 1],
    };

    /// Reads `ip:port` or `[ipv6]:port`, as peers publish it.
    ///
    /// # Errors
    ///
    /// A sentence that says what is wrong, for a message that also names the
    /// peer and the key: the library parses numeric addresses only, so names,
    /// scope ids, a missing port and port 0 are all refused here.
    pub fn parse(text: &str) -> Result<Self, &'static str> {
        if text.is_empty() {
            return Err("is empty, must be ip:port");
        }
        if text.len() > MAX_BYTES {
            return Err("is longer than 63 bytes, must be ip:port");
        }
        if text.contains('%') {
            return Err("has a scope id, which the library cannot parse");
        }
        match text.parse::<SocketAddr>() {
            Ok(address) if address.port() != 0 => Ok(Self::pack(text)),
            Ok(_) => Err("has port 0, must be ip:port"),
            Err(_) => Err("is not a numeric ip:port or [ipv6]:port"),
        }
    }

    fn pack(text: &str) -> Self {
        let mut endpoint = Self::EMPTY;
        endpoint.bytes[..text.len()].copy_from_slice(text.as_bytes());
        endpoint
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        let length = self.bytes.iter().position(|byte| *byte == 0);
        std::str::from_utf8(&self.bytes[..length.unwrap_or(MAX_BYTES)]).unwrap_or_default()
    }

    /// As `==`, for where most of those that are compared differ: endpoints of one
    /// network differ behind their first few bytes, which a word at a time finds
    /// sooner than a call does.
    #[inline]
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        let (ours, _) = self.bytes.as_chunks::<8>();
        let (theirs, _) = other.bytes.as_chunks::<8>();
        let mut words = ours.iter().zip(theirs);
        words.all(|(ours, theirs)| u64::from_ne_bytes(*ours) == u64::from_ne_bytes(*theirs))
    }

    /// Whether it is what [`Self::parse`] makes of `text`.
    pub(crate) fn is(&self, text: &[u8]) -> bool {
        // One that ends in a NUL would match the zeros behind the endpoint.
        text.last().is_some_and(|last| *last != 0)
            && self.bytes.starts_with(text)
            && self.bytes.get(text.len()).is_some_and(|next| *next == 0)
    }

    /// The text as the library reads it: NUL-terminated, at a stable place for
    /// as long as this value does not move.
    pub fn as_c_bytes(&self) -> &[u8; MAX_BYTES + 1] {
        &self.bytes
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Endpoint({})", self.as_str())
    }
}

/// The numeric address that this process listens on, without a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Host(IpAddr);

impl Host {
    /// Takes the host out of the engine's own address.
    ///
    /// `rpc_server_addr` is the local segment's RPC server address
    /// (`tent/runtime/segment.h`); where it is empty, `local_segment_name`
    /// serves. Both are understood as `ip`, `ip:port`, `name`, `name:port`,
    /// `[ipv6]`, `[ipv6]:port` or a bare IPv6 address. The port is not used: the
    /// library chooses its own, which no two processes can race for.
    ///
    /// # Errors
    ///
    /// [`Error::AddressInvalid`] naming the address, where it came from and
    /// what is wrong with it.
    pub fn resolve(rpc_server_addr: &str, local_segment_name: &str) -> Result<Self, Error> {
        let (address, origin) = if rpc_server_addr.is_empty() {
            (local_segment_name, "local_segment_name")
        } else {
            (rpc_server_addr, "rpc_server_addr")
        };
        Self::parse(address).map_err(|reason| Error::AddressInvalid {
            address: address.to_owned(),
            origin,
            reason,
        })
    }

    fn parse(address: &str) -> Result<Self, String> {
        const SHAPES: &str = "must be ip, ip:port, name:port or [ipv6]:port";
        if address.is_empty() {
            return Err(format!("is empty, {SHAPES}"));
        }
        if address.contains('%') {
            return Err(
                "has a scope id, which the library cannot parse; use a global address".to_owned(),
            );
        }
        let host = match address.strip_prefix('[') {
            Some(rest) => {
                let (host, port) = rest
                    .split_once(']')
                    .ok_or_else(|| format!("lacks a ], {SHAPES}"))?;
                if !port.is_empty() {
                    check_port(port.strip_prefix(':').unwrap_or_default())?;
                }
                let ip = host.parse().map_err(|_| {
                    format!("'{host}' between the brackets is no IPv6 address, {SHAPES}")
                })?;
                return Self::reachable(IpAddr::V6(ip));
            }
            None => address,
        };
        if let Ok(ip) = host.parse::<IpAddr>() {
            return Self::reachable(ip);
        }
        let name = match host.split_once(':') {
            Some((name, port)) => {
                check_port(port)?;
                name
            }
            None => host,
        };
        if name.is_empty() {
            return Err(format!("has no host, {SHAPES}"));
        }
        if let Ok(ip) = name.parse::<IpAddr>() {
            return Self::reachable(ip);
        }
        if ends_in_a_number(name) {
            return Err(format!("'{name}' is no IPv4 address, {SHAPES}"));
        }
        // The library parses numeric addresses only, so a name is resolved here.
        let resolved = (name, 0)
            .to_socket_addrs()
            .map_err(|error| format!("host name '{name}' does not resolve ({error}), {SHAPES}"))?
            .map(|address| address.ip())
            .next()
            .ok_or_else(|| format!("host name '{name}' has no address, {SHAPES}"))?;
        Self::reachable(resolved)
    }

    fn reachable(ip: IpAddr) -> Result<Self, String> {
        if ip.is_unspecified() {
            return Err(
                "is the unspecified address, which no peer can connect to; name an interface"
                    .to_owned(),
            );
        }
        Ok(Self(ip))
    }

    /// The address.
    pub(crate) fn ip(self) -> IpAddr {
        self.0
    }

    /// The endpoint of this host at `port`, brackets around IPv6 exactly once.
    ///
    /// Always fits: the longest IPv6 form has 47 bytes of the 63.
    pub fn at(&self, port: u16) -> Endpoint {
        Endpoint::pack(&SocketAddr::new(self.0, port).to_string())
    }
}

/// At most `limit` characters of what a peer published, fit for one line of a
/// log: it may be anything, of any size.
pub(crate) fn excerpt(published: &str, limit: usize) -> String {
    let mut shown = String::new();
    for character in published.chars().take(limit) {
        match character {
            '"' | '\'' => shown.push(character),
            _ => shown.extend(character.escape_debug()),
        }
    }
    if published.chars().nth(limit).is_some() {
        shown.push('…');
    }
    shown
}

/// Whether a resolver would take `name` for an address, and for another one than
/// is written: it reads `10.5` as 10.0.0.5 and `10.0.0.010` as 10.0.0.8. No host
/// name ends in a number.
fn ends_in_a_number(name: &str) -> bool {
    let name = name.strip_suffix('.').unwrap_or(name);
    let last = name.rsplit('.').next().unwrap_or_default();
    let hexadecimal = last
        .strip_prefix("0x")
        .or_else(|| last.strip_prefix("0X"))
        .is_some_and(|digits| digits.bytes().all(|byte| byte.is_ascii_hexdigit()));
    hexadecimal || last.bytes().all(|byte| byte.is_ascii_digit())
}

fn check_port(port: &str) -> Result<(), String> {
    match port.parse::<u16>() {
        Ok(_) if !port.starts_with('+') => Ok(()),
        _ => Err(format!("port '{port}' is not a number from 0 to 65535")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_is_the_same_where_every_byte_is() {
        let one = Endpoint::parse("10.0.0.1:1001").expect("a literal");
        for text in [
            "10.0.0.1:1001",
            "10.0.0.1:1002",
            "10.0.0.1:10011",
            "20.0.0.1:1001",
        ] {
            let other = Endpoint::parse(text).expect("a literal");
            assert_eq!(one.is_same(&other), one == other, "{text}");
        }
    }

    #[test]
    fn case_10_the_local_address_is_understood_in_every_form() {
        for (address, url, advertised) in [
            ("10.0.0.5:12345", "10.0.0.5:0", "10.0.0.5:45123"),
            ("10.0.0.5", "10.0.0.5:0", "10.0.0.5:45123"),
            (
                "[2001:db8::1]:12345",
                "[2001:db8::1]:0",
                "[2001:db8::1]:45123",
            ),
            ("[2001:db8::1]", "[2001:db8::1]:0", "[2001:db8::1]:45123"),
            ("2001:db8::1", "[2001:db8::1]:0", "[2001:db8::1]:45123"),
            ("::1", "[::1]:0", "[::1]:45123"),
            (
                "[::ffff:10.0.0.5]:1",
                "[::ffff:10.0.0.5]:0",
                "[::ffff:10.0.0.5]:45123",
            ),
        ] {
            let host = Host::resolve(address, "").expect(address);
            assert_eq!(host.at(0).as_str(), url, "url for {address}");
            assert_eq!(
                host.at(45123).as_str(),
                advertised,
                "endpoint for {address}"
            );
        }
    }

    #[test]
    fn case_10_a_malformed_local_address_is_named() {
        for address in [
            "[2001::db8::1]:9",
            ":12345",
            "10.0.0.5:",
            "10.0.0.5:70000",
            "10.0.0.5:+1",
            "[::1",
            "[::1]12",
            "[10.0.0.5]:1",
            "fe80::1%eth0",
            "[fe80::1%eth0]:7",
            "0.0.0.0:5",
            "[::]:5",
            "no such host:1",
            "10.5",
            "10.5:7",
            "10.0.0.010:1",
            "2130706433",
            "0x7f.1",
            "0x7f000001",
            "10.0.0.5.",
        ] {
            let error = Host::resolve(address, "10.0.0.9").expect_err(address);
            let text = error.to_string();
            assert!(text.contains(&format!("'{address}'")), "{text}");
            assert_eq!(error.status(), crate::Status::InvalidArgument, "{text}");
        }
        let error = Host::resolve("", "").expect_err("both are empty");
        assert!(error.to_string().contains("local_segment_name"), "{error}");
    }

    #[test]
    fn the_segment_name_serves_where_there_is_no_rpc_address() {
        let host = Host::resolve("", "10.0.0.7:1").expect("a valid segment name");
        assert_eq!(host.at(0).as_str(), "10.0.0.7:0");
        let host = Host::resolve("localhost:80", "").expect("localhost resolves");
        assert!(["127.0.0.1:0", "[::1]:0"].contains(&host.at(0).as_str()));
    }

    #[test]
    fn a_peer_endpoint_is_numeric_and_has_a_port() {
        for text in ["10.0.0.9:1", "[::1]:65535"] {
            assert_eq!(Endpoint::parse(text).expect(text).as_str(), text);
        }
        for (text, reason) in [
            ("", "empty"),
            ("10.0.0.9", "not a numeric"),
            ("10.0.0.9:0", "port 0"),
            ("10.0.0.9:65536", "not a numeric"),
            ("::1:80", "not a numeric"),
            ("host:80", "not a numeric"),
            (" 10.0.0.9:1", "not a numeric"),
            ("[fe80::1%2]:80", "scope id"),
            ("10.0.0.9:1\0", "not a numeric"),
            (&"1".repeat(64), "63 bytes"),
        ] {
            let problem = Endpoint::parse(text).expect_err(text);
            assert!(problem.contains(reason), "{text}: {problem}");
        }
    }

    #[test]
    fn the_longest_endpoint_fits_with_its_terminator() {
        let longest = "[ffff:ffff:ffff:ffff:ffff:ffff:255.255.255.255]:65535";
        let endpoint = Endpoint::parse(longest).expect("a legal address");
        assert_eq!(endpoint.as_str(), longest);
        assert_eq!(endpoint.as_c_bytes()[longest.len()], 0);
    }
}
