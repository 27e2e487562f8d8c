// SPDX-License-Identifier: Apache-2.0
//! What the operating system says about a peer's process.
//!
//! A process holds a UDP port at its unique id for as long as it lives, see
//! [`Instance`](super::Instance). When it ends, its machine refuses datagrams to
//! that port, and the refusal comes back as an error of the socket that sent
//! them. A process that is stopped refuses nothing.
//!
//! A peer that is not this transport need not hold that port, and would seem dead
//! while it lives. So a refusal is believed only of a peer that did not refuse the
//! first datagrams, which go out before the first copy to it.

use std::collections::HashMap;
use std::io::ErrorKind;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::time::Duration;

use parking_lot::Mutex;

use crate::endpoint::Endpoint;

/// How many first datagrams there are: one may be lost.
const FIRST: usize = 3;
/// How long a refusal may be on its way.
const ANSWER: Duration = Duration::from_millis(100);
/// More peers than the library has at once; past it all are met anew.
const MOST_PEERS: usize = 4096;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Liveness(Mutex<HashMap<Endpoint, Port>>);

/// What is known of a peer's port.
#[derive(Debug)]
enum Port {
    /// The first datagrams went out through this socket, which has a refusal as a
    /// pending error.
    Asked(UdpSocket),
    /// Its process held the port when they arrived.
    Held,
    /// It did not, or that cannot be told: a refusal says nothing.
    Unknown,
}

impl Port {
    fn ask(peer: &Endpoint) -> Self {
        let Some(socket) = connect(peer) else {
            return Self::Unknown;
        };
        for _ in 0..FIRST {
            if socket.send(&[]).is_err() {
                return Self::Unknown;
            }
        }
        Self::Asked(socket)
    }

    fn settle(&mut self) {
        if let Self::Asked(socket) = self {
            *self = match socket.take_error() {
                Ok(None) => Self::Held,
                Ok(Some(_)) | Err(_) => Self::Unknown,
            };
        }
    }
}

impl Liveness {
    /// To be called before each copy to `peer`.
    pub(super) fn meet(&self, peer: &Endpoint) {
        let mut ports = self.0.lock();
        match ports.get_mut(peer) {
            Some(port) => port.settle(),
            None => {
                if ports.len() == MOST_PEERS {
                    ports.clear();
                }
                ports.insert(*peer, Port::ask(peer));
            }
        }
    }

    /// Whether the system says now that the process of `peer` does not exist any
    /// more. False if that cannot be told. Takes as long as a refusal may be on
    /// its way.
    pub(super) fn is_gone(&self, peer: &Endpoint) -> bool {
        let held = self.0.lock().get_mut(peer).is_some_and(|port| {
            port.settle();
            matches!(port, Port::Held)
        });
        held && connect(peer).is_some_and(|socket| refuses(&socket))
    }
}

fn connect(peer: &Endpoint) -> Option<UdpSocket> {
    let address: SocketAddr = peer.as_str().parse().ok()?;
    let own: SocketAddr = match address {
        SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
        SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
    };
    let socket = UdpSocket::bind(own).ok()?;
    socket.connect(address).ok()?;
    // A peer whose buffer is full has the datagram dropped by its kernel; nothing
    // here may wait for room either.
    socket.set_read_timeout(Some(ANSWER)).ok()?;
    Some(socket)
}

/// Whether a datagram is refused. Another error, such as that of a machine that
/// cannot be reached, says nothing about the process.
fn refuses(socket: &UdpSocket) -> bool {
    let refused = |error: std::io::Error| error.kind() == ErrorKind::ConnectionRefused;
    match socket.send(&[]) {
        // Nobody answers, so this waits for an error.
        Ok(_) => socket.recv(&mut [0]).is_err_and(refused),
        Err(error) => refused(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A process's port, and its name.
    fn process(ip: &str) -> Option<(UdpSocket, Endpoint)> {
        let socket = UdpSocket::bind((ip, 0)).ok()?;
        let name = socket.local_addr().expect("bound").to_string();
        Some((socket, Endpoint::parse(&name).expect("an address")))
    }

    #[test]
    fn a01_a_peer_that_held_its_port_is_gone_when_the_port_is_refused() {
        for ip in ["127.0.0.1", "::1"] {
            // There may be no IPv6 here.
            let Some((socket, peer)) = process(ip) else {
                continue;
            };
            let liveness = Liveness::default();
            liveness.meet(&peer);
            assert!(!liveness.is_gone(&peer));
            liveness.meet(&peer);
            assert!(!liveness.is_gone(&peer));
            drop(socket);
            assert!(liveness.is_gone(&peer));
            assert!(liveness.is_gone(&peer), "and stays so");
        }
    }

    #[test]
    fn a01_a_refusal_of_a_peer_that_refused_from_the_first_proves_nothing() {
        let (socket, peer) = process("127.0.0.1").expect("the loopback has ports");
        drop(socket);
        let liveness = Liveness::default();
        liveness.meet(&peer);
        assert!(!liveness.is_gone(&peer));
        liveness.meet(&peer);
        assert!(!liveness.is_gone(&peer), "never");
        let unmet = Endpoint::parse("127.0.0.1:9").expect("an address");
        assert!(!liveness.is_gone(&unmet));
    }

    #[test]
    fn a01_a_peer_that_reads_nothing_does_not_seem_gone() {
        let (_socket, peer) = process("127.0.0.1").expect("the loopback has ports");
        let liveness = Liveness::default();
        liveness.meet(&peer);
        // More than fit into its buffer.
        let flood = connect(&peer).expect("an address");
        for _ in 0..10_000 {
            flood.send(&[]).expect("the kernel drops it");
        }
        assert!(!liveness.is_gone(&peer));
    }

    #[test]
    fn b09_peers_are_forgotten_before_they_fill_the_memory() {
        let liveness = Liveness::default();
        let peer = |number: usize| Endpoint::parse(&format!("127.0.0.1:{}", 1 + number));
        for number in 0..MOST_PEERS + 5 {
            let port = match number {
                // Their sockets would be more than a process may have.
                0..MOST_PEERS => Port::Unknown,
                _ => Port::Held,
            };
            let peer = peer(number).expect("an address");
            if number < MOST_PEERS {
                liveness.0.lock().insert(peer, port);
            } else {
                liveness.meet(&peer);
            }
        }
        assert_eq!(liveness.0.lock().len(), 5);
    }
}
