// SPDX-License-Identifier: Apache-2.0
//! Stand-ins for the Ascend libraries: as little as the published
//! `memfabric-hybrid` 1.3.0 needs to move bytes over TCP on a machine with no NPU.
//!
//! The one shared object that this builds is put in place under the names in
//! [`NAMES`]. `libmf_hybm_core.so` wants every symbol before it starts, and then
//! calls the few in [`answered`], and `aclrtSetDevice` and `aclrtGetDevice` of the
//! emulated `libascendcl.so`. The rest fail when called. No data passes through
//! here.

pub mod answered;
mod refused;

// Its exported functions become this library's too.
use ascendcl as _;

/// The names under which `libmf_hybm_core.so` opens libraries that it cannot do
/// without.
pub const NAMES: [&str; 5] = [
    "libascendcl.so",
    "libascend_hal.so",
    "libra.so",
    "libtsdclient.so",
    "libhccl.so",
];
