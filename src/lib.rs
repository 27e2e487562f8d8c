// SPDX-License-Identifier: Apache-2.0
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
//! | vendor | [`vendor`] | the library, in two generations: [`Batched`], [`vendor::v1`] |
//!
//! Correct completion comes before speed: a task is COMPLETED only when the
//! library said that its batch succeeded, and memory that the library may still
//! touch is never freed. The clauses C1 to C20 that the documentation cites are
//! explained in [`batch`] and [`transport`].

pub mod backend;
pub mod batch;
mod bridge;
pub mod code;
pub mod config;
pub mod endpoint;
pub mod error;
mod footprint;
mod grouping;
mod limit;
mod logging;
pub mod memory;
#[cfg(test)]
mod memory_order;
mod polling;
mod process;
mod quiesce;
mod recycle;
pub mod region;
mod registration;
mod stale;
mod sync;
pub mod task;
pub mod transport;
pub mod vendor;
mod zeroed;

pub use backend::{Backend, BatchId, CopyBatch, Opcode, Pieces, Query, Refused};
pub use batch::SubBatch;
pub use code::Code;
pub use config::{Config, LogLevel, Protocol};
pub use endpoint::Endpoint;
pub use error::{Error, Status};
pub use region::Region;
pub use task::{Peer, Request, TaskState, TaskStatus};
pub use transport::Transport;
pub use vendor::{Batched, Library};
