// SPDX-License-Identifier: Apache-2.0
//! All that knows `libmf_smem.so` or CANN. Above it there is [`Backend`] and
//! nothing of a generation.

pub mod abi;
mod batched;
pub mod cann;
mod host_ranges;
mod library;
mod session;
pub mod v1;

use std::path::PathBuf;
use std::sync::Arc;

pub use batched::Batched;
pub use library::Library;
pub use session::data_op_type;
use v1::V1;

use crate::backend::Backend;
use crate::config::Config;
use crate::error::Error;
use crate::stale::Stale;

/// A backend that was brought up, and what a log tells of it.
pub struct Opened {
    /// The backend.
    pub backend: Arc<dyn Backend>,
    /// The file that the library was taken from.
    pub library: PathBuf,
    /// The Ascend device that it works with; 0 where none is needed.
    pub device: u32,
}

/// Opens the backend for the generation of the library that is configured.
///
/// # Errors
///
/// Those of [`Batched::open`], and for the published library those of
/// [`Error`] that concern it.
pub fn open(config: &Config) -> Result<Opened, Error> {
    open_with(config, Arc::default())
}

pub(crate) fn open_with(config: &Config, stale: Arc<Stale>) -> Result<Opened, Error> {
    Ok(match &config.v1 {
        None => {
            let backend = Batched::open_with(config, stale)?;
            Opened {
                library: backend.library_path().to_owned(),
                device: backend.device(),
                backend: Arc::new(backend),
            }
        }
        Some(settings) => {
            let backend = V1::open(config, settings, stale)?;
            Opened {
                library: backend.library().library_path().to_owned(),
                device: backend.library().device(),
                backend: Arc::new(backend),
            }
        }
    })
}
