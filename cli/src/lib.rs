// SPDX-License-Identifier: Apache-2.0
//! The `memfabric` command's parts, for its own tests.
#![allow(missing_docs)]

pub mod doctor;
pub mod integrate;
pub mod replay;
