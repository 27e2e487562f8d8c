// SPDX-License-Identifier: Apache-2.0
//! Why a replay ends early, and with which exit status.

use std::process::ExitStatus;

use memfabric_transport::{Error, Status};

/// What ends a replay before its trace does.
#[derive(Debug, thiserror::Error)]
pub enum Problem {
    /// Something that the user gave cannot be used.
    #[error("{0}")]
    BadInput(String),
    /// The core refused what the user gave, or could not do what was asked.
    #[error(transparent)]
    Transport(#[from] Error),
    /// The target process could not be started or spoken to.
    #[error("target process: {0}")]
    Target(String),
    /// The target process is gone.
    #[error("target process ended early: {0}")]
    TargetGone(ExitStatus),
    /// Nothing came to an end for a long time.
    #[error(
        "no sub-batch was done for {waited_ms} ms (MF_TRANSFER_TIMEOUT), {in_flight} in flight{}",
        .last.as_deref().map(|text| format!("; {text}")).unwrap_or_default()
    )]
    Stalled {
        /// For how long.
        waited_ms: u128,
        /// Sub-batches that are not done.
        in_flight: usize,
        /// The last query error.
        last: Option<String>,
    },
    /// Too many failures to go on.
    #[error("gave up after {0} failed sub-batches")]
    GaveUp(u64),
    /// Ctrl-C.
    #[error("interrupted")]
    Interrupted,
}

impl Problem {
    /// 2 for what another command line would mend, 130 for Ctrl-C, else 1.
    pub fn exit_status(&self) -> u8 {
        match self {
            Self::BadInput(_) => 2,
            Self::Transport(error) => match error.status() {
                Status::InvalidArgument | Status::DeviceNotFound => 2,
                Status::Ok | Status::TooManyRequests | Status::InternalError => 1,
            },
            Self::Interrupted => 130,
            Self::Target(_) | Self::TargetGone(_) | Self::Stalled { .. } | Self::GaveUp(_) => 1,
        }
    }
}
