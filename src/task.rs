// SPDX-License-Identifier: Apache-2.0
//! What a caller submits, and what it is told.

use crate::backend::Opcode;
use crate::endpoint::{self, Endpoint};

/// One transfer that the engine asks for.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// Local address.
    pub source: usize,
    /// Address in the peer's memory.
    pub target: usize,
    /// Bytes; 0 is COMPLETED at once and never reaches the library.
    pub length: usize,
    /// Position of the peer in the call's list.
    pub peer: u32,
    /// Direction.
    pub opcode: Opcode,
}

/// One target of a call, as the engine's metadata describes it.
///
/// Two entries with one endpoint are one peer.
#[derive(Clone, Copy, Debug)]
pub struct Peer<'a> {
    /// The segment's name, for messages.
    pub name: &'a str,
    /// Its endpoint as published, `ip:port`.
    pub endpoint: &'a str,
    /// Why there is no endpoint; empty if there is one.
    pub problem: &'a str,
}

impl<'a> Peer<'a> {
    /// A peer that is known by its endpoint, `ip:port`, alone.
    pub const fn at(endpoint: &'a str) -> Self {
        Self {
            name: endpoint,
            endpoint,
            problem: "",
        }
    }
}

/// Most characters of a peer's name and of its problem in a message.
const LONGEST_NAME: usize = 255;
const LONGEST_PROBLEM: usize = 511;

/// A [`Peer`] as it comes from outside: whether it is text matters only where it is
/// read, which is once for each endpoint and not once a call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Described<'a> {
    pub(crate) name: &'a [u8],
    pub(crate) endpoint: &'a [u8],
    pub(crate) problem: &'a [u8],
}

impl<'a> From<Peer<'a>> for Described<'a> {
    fn from(peer: Peer<'a>) -> Self {
        Self {
            name: peer.name.as_bytes(),
            endpoint: peer.endpoint.as_bytes(),
            problem: peer.problem.as_bytes(),
        }
    }
}

impl Described<'_> {
    pub(crate) fn parse(&self) -> Result<Endpoint, String> {
        let text = |bytes, limit| endpoint::excerpt(&String::from_utf8_lossy(bytes), limit);
        if !self.problem.is_empty() {
            // It may quote what the peer published.
            return Err(text(self.problem, LONGEST_PROBLEM));
        }
        Endpoint::parse(&String::from_utf8_lossy(self.endpoint)).map_err(|problem| {
            let published = text(self.endpoint, endpoint::MAX_BYTES);
            format!("memfabric_unique_id '{published}' {problem}")
        })
    }

    pub(crate) fn shown_name(&self) -> String {
        endpoint::excerpt(&String::from_utf8_lossy(self.name), LONGEST_NAME)
    }
}

/// What a task is told to TENT as; the engine handles no other state well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TaskState {
    /// Not done, or not known to be.
    Pending,
    /// Every byte was moved.
    Completed,
    /// Not moved, or only partly: memory may have been written, and nothing
    /// rolls back (C3).
    Failed,
}

/// Answer to a poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskStatus {
    /// The state.
    pub state: TaskState,
    /// Bytes known to be moved: all of them if completed, else 0.
    pub bytes: u64,
}

impl TaskStatus {
    /// PENDING with 0 bytes (C1).
    pub const PENDING: Self = Self {
        state: TaskState::Pending,
        bytes: 0,
    };
    /// FAILED with 0 bytes (C3, C6).
    pub const FAILED: Self = Self {
        state: TaskState::Failed,
        bytes: 0,
    };
}
