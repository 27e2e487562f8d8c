// SPDX-License-Identifier: Apache-2.0
//! The seam to the vendor: what the transport asks of whatever moves the bytes.
// `Pieces` go to another thread.
#![allow(unsafe_code)]

use std::fmt;

use crate::code::Code;
use crate::endpoint::Endpoint;
use crate::error::Error;
use crate::region::Region;

/// What the backend calls a batch. 0 is as good an id as any other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct BatchId(pub u64);

/// Direction of a transfer, seen from this process.
///
/// An open enumeration, for the number comes from outside; a submission checks
/// it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Opcode(pub u8);

impl Opcode {
    /// Remote to local.
    pub const READ: Self = Self(0);
    /// Local to remote.
    pub const WRITE: Self = Self(1);
}

impl fmt::Display for Opcode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::READ => f.write_str("READ"),
            Self::WRITE => f.write_str("WRITE"),
            Self(number) => write!(f, "opcode {number}"),
        }
    }
}

/// The answer to one question about a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Query {
    /// Still running; ask again (C1).
    Pending,
    /// Ended, and **all memory accesses of the batch have stopped**, whatever
    /// the result (C2, C3). Given once per batch (C4).
    Done(Code),
    /// The question failed; nothing is known of the batch (C5).
    Error(Code),
}

/// One vendor batch: pieces for one peer in one direction.
///
/// The library may read the arrays, the peer's name and the parameter block
/// until the batch is done, for the ABI does not say that it copies them. So
/// once submitted, a batch is neither moved, changed nor freed before its result
/// is in. Entry `i` of the three arrays is one piece.
#[derive(Debug)]
pub struct CopyBatch {
    peer: Endpoint,
    opcode: Opcode,
    local: Vec<usize>,
    remote: Vec<usize>,
    lengths: Vec<usize>,
    pub(crate) block: Block,
}

/// Room for the vendor's own view of a [`CopyBatch`], which must live as long.
#[derive(Debug, Default)]
pub(crate) struct Block(pub(crate) [u64; 8]);

impl Default for CopyBatch {
    fn default() -> Self {
        Self {
            peer: Endpoint::EMPTY,
            opcode: Opcode::READ,
            local: Vec::new(),
            remote: Vec::new(),
            lengths: Vec::new(),
            block: Block::default(),
        }
    }
}

impl CopyBatch {
    /// Begins anew for another peer and direction, keeping the room of the
    /// arrays.
    pub fn reset(&mut self, peer: Endpoint, opcode: Opcode) {
        self.peer = peer;
        self.opcode = opcode;
        self.local.clear();
        self.remote.clear();
        self.lengths.clear();
    }

    /// Takes what `other` has and leaves it the room of its own arrays.
    pub(crate) fn take(&mut self, other: &mut Self) {
        self.peer = other.peer;
        self.opcode = other.opcode;
        std::mem::swap(&mut self.local, &mut other.local);
        std::mem::swap(&mut self.remote, &mut other.remote);
        std::mem::swap(&mut self.lengths, &mut other.lengths);
    }

    /// Adds a piece: local address, remote address, bytes.
    #[inline]
    pub fn push(&mut self, local: usize, remote: usize, length: usize) {
        self.local.push(local);
        self.remote.push(remote);
        self.lengths.push(length);
    }

    /// Adds many pieces, array by array.
    pub(crate) fn extend(&mut self, pieces: impl Iterator<Item = (usize, usize, usize)> + Clone) {
        self.local.extend(pieces.clone().map(|(local, _, _)| local));
        self.remote
            .extend(pieces.clone().map(|(_, remote, _)| remote));
        self.lengths.extend(pieces.map(|(_, _, length)| length));
    }

    /// The peer.
    pub fn peer(&self) -> &Endpoint {
        &self.peer
    }

    /// The direction.
    pub fn opcode(&self) -> Opcode {
        self.opcode
    }

    /// Local addresses, for both directions.
    pub fn local(&self) -> &[usize] {
        &self.local
    }

    /// Remote addresses, for both directions.
    pub fn remote(&self) -> &[usize] {
        &self.remote
    }

    /// Bytes of each piece.
    pub fn lengths(&self) -> &[usize] {
        &self.lengths
    }

    /// Number of pieces.
    pub fn len(&self) -> usize {
        self.lengths.len()
    }

    /// Whether there is no piece.
    pub fn is_empty(&self) -> bool {
        self.lengths.is_empty()
    }

    /// Its arrays for a vendor call. The batch must stay in place and unchanged
    /// until that call, or what it begins, has ended.
    ///
    /// # Errors
    ///
    /// SM_INVALID_PARAM for more pieces than the ABI can count: refused as the
    /// library would.
    pub(crate) fn pieces(&mut self) -> Result<Pieces, Code> {
        let count = u32::try_from(self.len()).map_err(|_| Code::INVALID_PARAM)?;
        Ok(Pieces {
            peer: self.peer,
            opcode: self.opcode,
            local: self.local.as_mut_ptr(),
            remote: self.remote.as_mut_ptr(),
            lengths: self.lengths.as_mut_ptr(),
            count,
        })
    }

    /// Pieces that fit without growing the arrays.
    pub(crate) fn room(&self) -> usize {
        self.lengths.capacity()
    }

    /// Bytes of all pieces; no more than there are numbers for.
    pub fn bytes(&self) -> u64 {
        let lengths = self.lengths.iter();
        lengths.fold(0, |sum: u64, length| sum.saturating_add(*length as u64))
    }
}

/// The arguments of one copy. The arrays have `count` entries each and belong to
/// a [`CopyBatch`] that stays as it is until its result was asked for.
#[derive(Clone, Copy, Debug)]
pub struct Pieces {
    /// The peer's name.
    pub peer: Endpoint,
    /// Direction.
    pub opcode: Opcode,
    /// Local addresses.
    pub local: *mut usize,
    /// Remote addresses.
    pub remote: *mut usize,
    /// Bytes of each piece.
    pub lengths: *mut usize,
    /// Entries.
    pub count: u32,
}

// SAFETY: the arrays stay in place and unchanged until a query has answered
// Done, which it does only after the worker has given them up.
unsafe impl Send for Pieces {}

/// Why the vendor did not take a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// The vendor's code; success makes no success of it.
    pub code: Code,
    /// What else there is to say, empty if nothing.
    pub reason: String,
    /// Whether the code may also mean that the batch was taken in part: its
    /// arrays must stay then, for the library may still read them.
    pub doubtful: bool,
}

impl From<Code> for Refused {
    fn from(code: Code) -> Self {
        Self {
            code,
            reason: String::new(),
            doubtful: false,
        }
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.reason.as_str() {
            "" => self.code.fmt(f),
            reason => write!(f, "{}: {reason}", self.code),
        }
    }
}

/// What moves the bytes: the library, or a scripted stand-in in a test.
///
/// Calls come from any thread. The transport makes `submit`, `query` and `fence`
/// one at a time (C15). `register` and `deregister` may run beside them and, for
/// ranges that share no byte, beside each other; no batch that the transport
/// knows of uses a range when it is deregistered. No method may call back into
/// the transport, but for marking a peer as down.
///
/// Dropping a backend ends it; the transport drops it only when nothing is
/// outstanding, and otherwise leaks it (C13).
pub trait Backend: Send + Sync {
    /// What peers connect to.
    fn endpoint(&self) -> &Endpoint;

    /// Registers every region or reports a failure, after which the transport
    /// deregisters each of them. Nothing is rounded.
    ///
    /// # Errors
    ///
    /// The vendor's code with its function.
    ///
    /// # Safety
    ///
    /// Each region is memory of this process that stays mapped until it was
    /// deregistered. Peers may read and write it from now on, at any time.
    unsafe fn register(&self, regions: &[Region]) -> Result<(), Error>;

    /// Withdraws the region that begins at `address`.
    ///
    /// # Errors
    ///
    /// The vendor's code with its function.
    fn deregister(&self, address: usize) -> Result<(), Error>;

    /// Gives a batch to the vendor and returns at once.
    ///
    /// # Errors
    ///
    /// Nothing of the batch was or will be executed (C6), unless the refusal is
    /// doubtful.
    ///
    /// # Safety
    ///
    /// - until a query answered [`Query::Done`], or the backend was dropped,
    ///   `batch` is neither moved, changed nor freed; after a doubtful refusal,
    ///   never
    /// - for as long, the memory at its local addresses can be read (WRITE) or
    ///   written (READ), and nobody else writes it (WRITE) or uses it (READ);
    ///   where the peer is this process, the same holds for its remote addresses
    unsafe fn submit(&self, batch: &mut CopyBatch) -> Result<BatchId, Refused>;

    /// Asks once about a batch that was accepted and is not done. An answer that
    /// does not prove that the batch's accesses have stopped is an error, not an
    /// ending (C20).
    fn query(&self, id: BatchId) -> Query;

    /// The last resort of a teardown that has waited in vain: ends whatever the
    /// library still does to this process's memory, if it can be ended for
    /// certain, after which queries answer [`Query::Done`]. Answers whether there
    /// is anything to ask about again. Nothing is submitted, registered or
    /// deregistered any more. Interrupts no call (C12).
    fn fence(&self) -> bool {
        false
    }

    /// Told in place of a drop when the transport is torn down with batches
    /// outstanding (C13): what is running goes on, and nothing that only waits
    /// in this process is begun any more.
    fn abandon(&self) {}
}
