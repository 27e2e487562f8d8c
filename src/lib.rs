//! The core of the MemFabric transport for Mooncake TENT.
//!
//! MemFabric's `libmf_smem.so` moves memory between Ascend NPUs, and hosts,
//! over SDMA, RDMA, URMA and UBoE. This crate opens it at run time, groups
//! requests into asynchronous vendor batches, tracks their completion and
//! quiesces. Data flows one way down and one way up, and no layer reaches past
//! its neighbour:
//!
//! | layer | module | noun |
//! |---|---|---|
//! | TENT's view | [`transport`] | [`Transport`], what the C++ shim calls |
//! | state machine | [`batch`] | tasks, sub-batches, vendor batches |
//! | seam | [`backend`] | [`Backend`]: register, submit, query |
//! | vendor library | [`library`], [`abi`] | [`Library`]: 13 symbols |
//! | the published 1.x one | [`published`] | a second [`Backend`], its library's calls queued |
//!
//! Correct completion comes before speed: a task is COMPLETED only when the
//! library said that its batch succeeded, and memory that the library may still
//! touch is never freed. The clauses C1 to C15 that the documentation cites are
//! explained in [`batch`] and [`transport`].

pub mod abi;
pub mod backend;
pub mod batch;
mod bridge;
pub mod config;
pub mod device;
pub mod endpoint;
pub mod error;
mod footprint;
mod grouping;
mod host_ranges;
pub mod library;
mod limit;
mod logging;
pub mod memory;
#[cfg(test)]
mod memory_order;
mod process;
pub mod published;
mod quiesce;
mod recycle;
mod registration;
mod suspects;
mod sync;
pub mod transport;
mod vendor;
mod zeroed;

pub use backend::{Backend, BatchId, CopyBatch, Opcode, Query, Refused, SmemBackend};
pub use batch::{Peer, Request, SubBatch, TaskState, TaskStatus};
pub use config::{Config, LogLevel, Protocol};
pub use endpoint::Endpoint;
pub use error::{Code, Error, Status};
pub use library::Library;
pub use memory::Region;
pub use transport::Transport;
