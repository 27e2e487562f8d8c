//! The published 1.x library: another generation of the interface, opted into
//! with `MF_ABI=v1` \[pub\].
//!
//! It differs from the one that [`crate::SmemBackend`] is for in that its copies
//! block, that processes find each other through a configuration store, and that
//! one side of a connection must be the sender, the other the receiver; each can
//! read and write then.

pub mod abi;
mod instance;
mod library;
mod liveness;
mod log;
mod names;
mod proof;
mod queue;
mod settings;
mod worker;

pub use instance::Instance;
pub use library::Library;
pub use queue::{Pace, Pieces, Queued, Synchronous};
pub use settings::{Role, Settings, TentSettings};

/// [`Backend`](crate::Backend) over the published library.
pub type PublishedBackend = Queued<Instance>;
