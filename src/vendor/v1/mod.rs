// SPDX-License-Identifier: Apache-2.0
//! The published 1.x library: another generation of the interface, opted into
//! with `MF_ABI=v1` \[pub\].
//!
//! It differs from the one that [`super::Batched`] is for in that its copies
//! block, that processes find each other through a configuration store, and that
//! one side of a connection must be the sender, the other the receiver; each can
//! read and write then.

pub mod abi;
mod instance;
mod lanes;
mod library;
mod liveness;
mod log;
mod names;
mod proof;
mod queue;
mod synchronous;
mod worker;

pub use instance::Instance;
pub use library::Library;
pub use queue::Queued;
pub use synchronous::{Pace, Pieces, Synchronous};

/// [`Backend`](crate::Backend) over the published library.
pub type V1 = Queued<Instance>;
