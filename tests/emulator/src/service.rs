// SPDX-License-Identifier: Apache-2.0
//! The thread that accepts connections and notices when a peer is gone.

use std::collections::HashSet;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::abi::SM_NOT_CONNECTED;
use crate::handle::Handle;
use crate::peer::{HELLO_SIZE, Hello, Peer};
use crate::record::{self, Counter};
use crate::sys;

/// How long to leave the listener alone when there is no descriptor for the
/// connection that waits there.
const ACCEPT_PAUSE_MS: i32 = 20;

pub(crate) struct Service {
    handle: Arc<Handle>,
    listener: TcpListener,
    incoming: Vec<Incoming>,
    /// Instances whose end has been told, and that have not come back since.
    ended: HashSet<u64>,
}

/// A connection that a peer made.
struct Incoming {
    stream: TcpStream,
    from: SocketAddr,
    bytes: [u8; HELLO_SIZE],
    received: usize,
    hello: Option<Hello>,
}

impl Service {
    pub(crate) fn new(handle: Arc<Handle>, listener: TcpListener) -> Self {
        Self {
            handle,
            listener,
            incoming: Vec::new(),
            ended: HashSet::new(),
        }
    }

    pub(crate) fn run(mut self) {
        let mut accepting = true;
        loop {
            let outgoing: Vec<Arc<Peer>> = self.handle.peers.lock().clone();
            let interest = |fd| libc::pollfd {
                fd,
                events: libc::POLLIN,
                revents: 0,
            };
            let mut fds = Vec::with_capacity(2 + self.incoming.len() + outgoing.len());
            fds.push(interest(self.handle.waker.fd()));
            // poll passes over a negative descriptor.
            fds.push(interest(if accepting {
                self.listener.as_raw_fd()
            } else {
                -1
            }));
            fds.extend(
                self.incoming
                    .iter()
                    .map(|it| interest(it.stream.as_raw_fd())),
            );
            fds.extend(outgoing.iter().map(|it| interest(it.stream().as_raw_fd())));
            sys::poll(&mut fds, if accepting { -1 } else { ACCEPT_PAUSE_MS });
            // Before the flag is looked at: a wake-up between the two would be
            // drained without having been heeded.
            self.handle.waker.drain();
            if self.handle.stopping.load(Ordering::Acquire) {
                return;
            }

            for peer in outgoing.iter().filter(|peer| peer.alive()) {
                self.ended.remove(&peer.instance);
            }
            let mut ready = fds.iter().map(|fd| fd.revents != 0).skip(2);
            let mut gone = Vec::new();
            self.incoming.retain_mut(|incoming| {
                let known = incoming.hello;
                let stays = !ready.next().unwrap_or(false) || incoming.advance();
                match (known, incoming.hello) {
                    (None, Some(hello)) => {
                        self.ended.remove(&hello.instance);
                    }
                    (Some(hello), _) if !stays => {
                        gone.push((hello.instance, incoming.name(hello)));
                    }
                    _ => {}
                }
                stays
            });
            for peer in &outgoing {
                // A peer that was ended here may have nothing to read yet.
                if (ready.next().unwrap_or(false) && ended(peer)) || !peer.alive() {
                    gone.push((peer.instance, peer.url.clone()));
                }
            }
            // Outgoing names are what the caller knows the peer by.
            for (instance, name) in gone.into_iter().rev() {
                self.tell(instance, &name);
            }
            accepting = self.accept();
        }
    }

    /// Ends the batches for a peer that is gone, then calls back, once.
    fn tell(&mut self, instance: u64, name: &str) {
        let gone: Vec<Arc<Peer>> = {
            let mut peers = self.handle.peers.lock();
            peers
                .extract_if(.., |peer| peer.instance == instance)
                .collect()
        };
        for peer in gone {
            record::subtract(Counter::peers, 1);
            peer.end();
            self.handle.lane.lock().fail(&peer, SM_NOT_CONNECTED);
            self.handle.forget(&peer);
        }
        if instance != self.handle.instance && self.ended.insert(instance) {
            record::print(record::Level::Info, &format!("the peer {name} is gone"));
            self.handle.call_peer_down(name);
        }
    }

    /// Takes the connections that wait; whether there may be more later.
    fn accept(&mut self) -> bool {
        loop {
            match self.listener.accept() {
                Ok((stream, from)) => {
                    if greet(&stream, &self.handle).is_ok() {
                        let (bytes, received, hello) = ([0; HELLO_SIZE], 0, None);
                        self.incoming.push(Incoming {
                            stream,
                            from,
                            bytes,
                            received,
                            hello,
                        });
                    }
                }
                Err(error) => match error.kind() {
                    ErrorKind::WouldBlock => return true,
                    ErrorKind::Interrupted | ErrorKind::ConnectionAborted => {}
                    // No descriptors, no memory: later.
                    _ => return false,
                },
            }
        }
    }
}

/// A new connection's buffer takes the few bytes of a welcome at once.
fn greet(mut stream: &TcpStream, handle: &Handle) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_nonblocking(true)?;
    stream.write_all(&handle.welcome().encode())
}

/// Whether the peer has closed the connection; it says nothing after the
/// handshake.
fn ended(peer: &Peer) -> bool {
    let mut byte = [0];
    match peer.stream().read(&mut byte) {
        Ok(count) => count == 0,
        Err(error) => !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted),
    }
}

impl Incoming {
    /// Reads what there is; whether the connection is still good.
    fn advance(&mut self) -> bool {
        // Full once the hello is there: anything after it is one byte too many.
        let mut extra = [0];
        let buffer = match self.hello {
            None => &mut self.bytes[self.received..],
            Some(_) => &mut extra[..],
        };
        match self.stream.read(buffer) {
            Ok(0) => false,
            Ok(count) if self.hello.is_none() => {
                self.received += count;
                if self.received == HELLO_SIZE {
                    self.hello = Hello::decode(self.bytes);
                    return self.hello.is_some();
                }
                true
            }
            Ok(_) => true,
            Err(error) => matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted),
        }
    }

    /// The endpoint of who connected.
    fn name(&self, hello: Hello) -> String {
        SocketAddr::new(self.from.ip(), hello.port).to_string()
    }
}
