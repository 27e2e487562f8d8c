// SPDX-License-Identifier: Apache-2.0
//! What a library whose copies block is asked for, and for how long.
// Takes memory by number, and arrays by address.
#![allow(unsafe_code)]

use std::time::Duration;

pub use crate::backend::Pieces;
use crate::code::Code;
use crate::endpoint::Endpoint;
use crate::error::Error;
use crate::region::Region;

/// A library whose copies block until they have ended, or have failed.
pub trait Synchronous: Send + Sync + 'static {
    /// What peers connect to.
    fn endpoint(&self) -> &Endpoint;

    /// See [`Backend::register`](crate::Backend::register).
    ///
    /// # Errors
    ///
    /// As there.
    ///
    /// # Safety
    ///
    /// As there.
    unsafe fn register(&self, regions: &[Region]) -> Result<(), Error>;

    /// See [`Backend::deregister`](crate::Backend::deregister).
    ///
    /// # Errors
    ///
    /// As there.
    fn deregister(&self, address: usize) -> Result<(), Error>;

    /// Moves the pieces of one batch. Comes from several threads at once, for one
    /// peer from one at a time.
    ///
    /// After success all memory accesses of the batch have stopped, and those of
    /// all earlier copies between the two processes; after SM_INVALID_PARAM there
    /// were none. Any other answer says nothing about them.
    ///
    /// # Safety
    ///
    /// Until success or SM_INVALID_PARAM is answered, or [`Self::is_gone`] is true
    /// of the peer, or [`Self::end`] has returned: the arrays have `count` entries
    /// each and stay in place and unchanged, and the memory at the local addresses
    /// is usable.
    unsafe fn copy(&self, pieces: Pieces) -> Code;

    /// Whether the operating system says now that the process of `peer` does not
    /// exist any more. False if that cannot be told.
    fn is_gone(&self, peer: &Endpoint) -> bool;

    /// Ends what the library does, so that it accesses no memory of this process
    /// from now on.
    ///
    /// # Safety
    ///
    /// No other call is being made, and none is made afterwards.
    unsafe fn end(&self);

    /// What to add to the message about a peer that stays unknown.
    fn hint(&self) -> String;
}

/// How long a [`Queued`](super::Queued) waits for what.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// How long a copy is tried again while the peer or its region is unknown.
    pub patience: Duration,
    /// How long a worker stays with nothing to do.
    pub idle: Duration,
    /// How long a copy that has failed, and is not proven to be over, is pending
    /// before its query is an error.
    pub grace: Duration,
    /// Between two questions whether a peer's process exists: what it sent before
    /// it ended has arrived by then.
    pub confirmation: Duration,
    /// First and longest pause between two attempts at a proof.
    pub attempts: (Duration, Duration),
}

impl Pace {
    /// What suits the published library.
    pub fn new(patience: Duration) -> Self {
        Self {
            patience,
            idle: Duration::from_secs(10),
            // The death of a peer is proven within a few hundred milliseconds, and
            // should not be seen as a query error.
            grace: Duration::from_secs(1),
            confirmation: Duration::from_millis(250),
            attempts: (Duration::from_millis(50), Duration::from_secs(1)),
        }
    }
}
