// SPDX-License-Identifier: Apache-2.0
//! Between the bridge's types and the core's.

use super::ffi::{self, Outcome, Peer, Region, Request, Setting, SettingKind};
use crate::backend::Opcode;
use crate::config::Value;
use crate::error::{Error, Status};
use crate::region;
use crate::task::{self, TaskState};

impl Outcome {
    pub(super) fn ok() -> Self {
        Self {
            code: Status::Ok as u16,
            message: String::new(),
        }
    }
}

impl From<Error> for Outcome {
    fn from(error: Error) -> Self {
        Self {
            code: error.status() as u16,
            message: error.to_string(),
        }
    }
}

impl From<Result<(), Error>> for Outcome {
    fn from(result: Result<(), Error>) -> Self {
        result.map_or_else(Self::from, |()| Self::ok())
    }
}

impl From<&Setting> for Value {
    fn from(setting: &Setting) -> Self {
        match setting.kind {
            SettingKind::Text => Self::Text(setting.text.clone()),
            SettingKind::Integer => Self::Integer(setting.integer),
            _ => Self::Other(setting.text.clone()),
        }
    }
}

impl From<&Region> for region::Region {
    fn from(region: &Region) -> Self {
        Self {
            address: region.address,
            length: region.length,
        }
    }
}

impl<'a> From<&'a Peer<'a>> for task::Described<'a> {
    fn from(peer: &'a Peer<'a>) -> Self {
        Self {
            name: peer.name,
            endpoint: peer.endpoint,
            problem: peer.problem,
        }
    }
}

impl From<&Request> for task::Request {
    fn from(request: &Request) -> Self {
        Self {
            source: request.source,
            // Addresses have 64 bits on every machine that the library runs on.
            target: request.target as usize,
            length: request.length,
            peer: request.peer,
            opcode: Opcode(request.opcode),
        }
    }
}

impl From<TaskState> for ffi::TaskState {
    fn from(state: TaskState) -> Self {
        match state {
            TaskState::Pending => Self::Pending,
            TaskState::Completed => Self::Completed,
            TaskState::Failed => Self::Failed,
        }
    }
}
