// SPDX-License-Identifier: Apache-2.0
//! The published `libmf_smem.so`: all of its symbols or none.
// A symbol's type is our word.
#![allow(unsafe_code)]

use std::path::Path;

use super::abi;
use crate::config::Generation;
use crate::error::Error;
use crate::vendor::library::{Loaded, symbols};

symbols! {
    smem_trans_init,
    smem_trans_uninit,
    smem_trans_config_init,
    smem_trans_create,
    smem_trans_destroy,
    smem_trans_register_mem,
    smem_trans_batch_register_mem,
    smem_trans_deregister_mem,
    smem_trans_batch_write,
    smem_trans_batch_read,
    smem_trans_set_peer_down_callback,
    smem_set_log_level,
    smem_set_extern_logger,
    smem_create_config_store,
    smem_destroy_config_store,
}

impl Library {
    /// Opens `name` and resolves every symbol. No function of the library has
    /// been called when this returns, but for `smem_get_abi_version`.
    ///
    /// # Errors
    ///
    /// [`Error::LibraryUnavailable`]; [`Error::SymbolsMissing`] naming every
    /// missing symbol; [`Error::LibraryNewer`] for a library of the other
    /// generation, some of whose functions have the same names and take other
    /// arguments. A refused library is closed again.
    pub fn load(name: &Path) -> Result<Self, Error> {
        let loaded = Loaded::open(name)?;
        match Self::resolve(&loaded) {
            Ok(_) if loaded.exports("smem_trans_batch_copy") => Err(Error::LibraryNewer {
                library: name.display().to_string(),
            }),
            Ok(library) => {
                loaded.keep();
                Ok(library)
            }
            Err(missing) => Err(loaded.lacks(Generation::V1, abi::FUNCTIONS, missing)),
        }
    }
}
