// SPDX-License-Identifier: Apache-2.0
//! A peer that this side has connected to, and the handshake with it.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Weak;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use crate::abi::{
    SM_ERROR, SM_INVALID_PARAM, SM_NEW_OBJECT_FAILED, SM_NOT_CONNECTED, SM_OK, SM_TIMEOUT,
};
use crate::arguments::Blocks;
use crate::handle::Handle;
use crate::record;
use crate::regions::RemoteRegions;

const WELCOME_MAGIC: [u8; 8] = *b"MFEMU-W1";
const HELLO_MAGIC: [u8; 8] = *b"MFEMU-H1";

/// What a listener says first: who and where its regions are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Welcome {
    pub(crate) instance: u64,
    pub(crate) pid: u32,
    pub(crate) table_fd: u32,
}

/// Bytes of a [`Welcome`].
const WELCOME_SIZE: usize = 24;

impl Welcome {
    pub(crate) fn encode(self) -> [u8; WELCOME_SIZE] {
        let mut bytes = [0; WELCOME_SIZE];
        bytes[..8].copy_from_slice(&WELCOME_MAGIC);
        bytes[8..16].copy_from_slice(&self.instance.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.pid.to_le_bytes());
        bytes[20..].copy_from_slice(&self.table_fd.to_le_bytes());
        bytes
    }

    fn decode(bytes: [u8; WELCOME_SIZE]) -> Option<Self> {
        let (magic, rest) = bytes.split_first_chunk::<8>()?;
        let (instance, rest) = rest.split_first_chunk::<8>()?;
        let (pid, fd) = rest.split_first_chunk::<4>()?;
        (*magic == WELCOME_MAGIC).then_some(Self {
            instance: u64::from_le_bytes(*instance),
            pid: u32::from_le_bytes(*pid),
            table_fd: u32::from_le_bytes(fd.try_into().ok()?),
        })
    }
}

/// What the initiator answers: who it is, so that the listener can name it when
/// it is gone.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Hello {
    pub(crate) instance: u64,
    pub(crate) port: u16,
}

/// Bytes of a [`Hello`].
pub(crate) const HELLO_SIZE: usize = 18;

impl Hello {
    fn encode(self) -> [u8; HELLO_SIZE] {
        let mut bytes = [0; HELLO_SIZE];
        bytes[..8].copy_from_slice(&HELLO_MAGIC);
        bytes[8..16].copy_from_slice(&self.instance.to_le_bytes());
        bytes[16..].copy_from_slice(&self.port.to_le_bytes());
        bytes
    }

    pub(crate) fn decode(bytes: [u8; HELLO_SIZE]) -> Option<Self> {
        let (magic, rest) = bytes.split_first_chunk::<8>()?;
        let (instance, port) = rest.split_first_chunk::<8>()?;
        (*magic == HELLO_MAGIC).then_some(Self {
            instance: u64::from_le_bytes(*instance),
            port: u16::from_le_bytes(port.try_into().ok()?),
        })
    }
}

/// A connected peer.
pub(crate) struct Peer {
    pub(crate) url: String,
    pub(crate) instance: u64,
    pub(crate) pid: u32,
    /// The handle itself, if it is one of this process.
    pub(crate) local: Option<Weak<Handle>>,
    regions: Mutex<RemoteRegions>,
    stream: TcpStream,
    alive: AtomicBool,
}

/// Why there is no peer: a code for the caller and a sentence.
pub(crate) type Refusal = (i32, String);

impl Peer {
    /// Connects to `url` and exchanges greetings.
    pub(crate) fn connect(url: &str, hello: Hello, timeout: Duration) -> Result<Self, Refusal> {
        let address: SocketAddr = url
            .parse()
            .ok()
            .filter(|address: &SocketAddr| address.port() != 0)
            .ok_or_else(|| (SM_INVALID_PARAM, format!("destUrl {url:?} is no ip:port")))?;
        let (stream, welcome) = greet(&address, hello, timeout)
            .map_err(|error| (code_of(&error), format!("no peer at {url}: {error}")))?;
        let regions = RemoteRegions::open(welcome.pid, welcome.table_fd, welcome.instance)
            .map_err(|error| {
                let text = format!("the regions of {url} (process {}): {error}", welcome.pid);
                (code_of(&error), text)
            })?;
        Ok(Self {
            url: url.to_owned(),
            instance: welcome.instance,
            pid: welcome.pid,
            local: Handle::of_this_process(welcome.instance),
            regions: Mutex::new(regions),
            stream,
            alive: AtomicBool::new(true),
        })
    }

    pub(crate) fn alive(&self) -> bool {
        self.alive.load(Ordering::Acquire)
    }

    /// Marks the peer as gone; whether it was not yet.
    pub(crate) fn end(&self) -> bool {
        // So that the other side hears of it, if it is there at all.
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
        self.alive.swap(false, Ordering::AcqRel)
    }

    pub(crate) fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Checks the remote ranges of a batch, see [`RemoteRegions::check`].
    pub(crate) fn check(
        &self,
        blocks: &Blocks,
        translate: impl FnMut(usize, usize),
    ) -> Result<(), Refusal> {
        if !self.alive() {
            return Err((SM_NOT_CONNECTED, format!("the peer {} is gone", self.url)));
        }
        match self
            .regions
            .lock()
            .check(blocks.remote(), blocks.lengths(), translate)
        {
            (SM_OK, _) => Ok(()),
            (code, Some(index)) => Err((
                code,
                format!(
                    "block {index}, {:#x}+{}, is not inside a region registered by {}",
                    blocks.remote()[index],
                    blocks.lengths()[index],
                    self.url
                ),
            )),
            (code, None) => Err((code, format!("the peer {} is gone", self.url))),
        }
    }
}

fn greet(
    address: &SocketAddr,
    hello: Hello,
    timeout: Duration,
) -> io::Result<(TcpStream, Welcome)> {
    let mut stream = TcpStream::connect_timeout(address, timeout)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(timeout))?;
    stream.write_all(&hello.encode())?;
    let mut bytes = [0; WELCOME_SIZE];
    stream.read_exact(&mut bytes)?;
    let welcome = Welcome::decode(bytes).ok_or_else(|| {
        io::Error::new(
            ErrorKind::ConnectionRefused,
            "it does not speak as an emulator",
        )
    })?;
    stream.set_nonblocking(true)?;
    Ok((stream, welcome))
}

fn code_of(error: &io::Error) -> i32 {
    match error.raw_os_error() {
        Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM | libc::ENOBUFS) => SM_NEW_OBJECT_FAILED,
        Some(libc::EACCES | libc::EPERM) => SM_ERROR,
        _ => match error.kind() {
            // A read that runs into its time limit is WouldBlock on Linux.
            ErrorKind::TimedOut | ErrorKind::WouldBlock => SM_TIMEOUT,
            _ => SM_NOT_CONNECTED,
        },
    }
}

/// Says why a call fails, to whoever asks for the last error; returns the code.
pub(crate) fn refuse((code, text): Refusal) -> i32 {
    record::set_error(&text);
    record::print(record::Level::Info, &text);
    code
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn greetings_survive_the_wire() {
        let welcome = Welcome {
            instance: 0x0102_0304_0506_0708,
            pid: 77,
            table_fd: 5,
        };
        assert_eq!(Welcome::decode(welcome.encode()), Some(welcome));
        let hello = Hello {
            instance: 9,
            port: 65_535,
        };
        assert_eq!(Hello::decode(hello.encode()), Some(hello));
    }

    #[test]
    fn other_protocols_are_not_greetings() {
        assert_eq!(Welcome::decode(*b"HTTP/1.1 400 Bad Request"), None);
        assert_eq!(Hello::decode(*b"GET / HTTP/1.1\r\n\r\n"), None);
        let hello = Hello {
            instance: 9,
            port: 1,
        }
        .encode();
        let mut own_hello_echoed = [0; WELCOME_SIZE];
        own_hello_echoed[..HELLO_SIZE].copy_from_slice(&hello);
        assert_eq!(
            Welcome::decode(own_hello_echoed),
            None,
            "a socket connected to itself"
        );
    }

    #[test]
    fn an_endpoint_is_a_numeric_address_with_a_port() {
        let hello = Hello {
            instance: 1,
            port: 1,
        };
        for url in [
            "",
            "127.0.0.1",
            "127.0.0.1:0",
            "localhost:1",
            ":1",
            "::1:1",
            "[::1]",
            "1.2:3",
        ] {
            let refusal = Peer::connect(url, hello, Duration::from_secs(1)).map(|_| ());
            let (code, text) = refusal.expect_err(url);
            assert_eq!(code, SM_INVALID_PARAM, "{url}");
            assert!(text.contains(url), "{text}");
        }
    }
}
