// SPDX-License-Identifier: Apache-2.0
//! `libmf_smem.so`: opened through the dynamic linker, all 13 symbols or none.
// Opening a library runs its initialisers, and a symbol's type is our word.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};

use libloading::os::unix::{Library as Mapped, RTLD_LOCAL, RTLD_NOW};

use super::abi;
use crate::config::{Generation, Linked};
use crate::error::Error;

/// Opens `name` with every symbol bound at once, or tells the linker's words.
///
/// The name goes to the dynamic linker as it is, so a bare file name is looked
/// up in `LD_LIBRARY_PATH` as it was when the process started, the cache and
/// the default folders.
pub(crate) fn open(name: &Path) -> Result<Mapped, String> {
    // SAFETY:
    // - initialisers: opening the library is what the user configured, and a
    //   vendor's library may be expected to load without breaking its host
    // - RTLD_LOCAL: its symbols interpose nobody else's
    unsafe { Mapped::open(Some(name), RTLD_NOW | RTLD_LOCAL) }.map_err(|error| linker_words(&error))
}

/// The whole source chain: the error itself says only "dlopen failed", and the
/// linker's sentence, the one that names the culprit, is its source.
fn linker_words(error: &dyn std::error::Error) -> String {
    let deepest = std::iter::successors(Some(error), |error| error.source()).last();
    deepest.map_or_else(String::new, ToString::to_string)
}

/// Looks one function up; None if it is absent or null.
///
/// # Safety
///
/// `F` must be the function pointer type of the symbol, and the pointer must
/// not be called after `library` is closed.
pub(crate) unsafe fn function<F: Copy>(library: &Mapped, name: &str) -> Option<F> {
    // SAFETY: the caller vouches for F; Option of a function pointer is what a
    // symbol that may be null is read as.
    let symbol = unsafe { library.get::<Option<F>>(name) };
    symbol.ok().and_then(|symbol| *symbol)
}

/// Declares `Library`, the functions of one generation, whose types are in the
/// module `abi` under the functions' names.
macro_rules! symbols {
    ($($name:ident),* $(,)?) => {
        /// The functions that this generation of the library must export. A value
        /// exists only when all of them were found.
        ///
        /// The file stays mapped until the process ends, whatever becomes of this
        /// value: the library's threads and thread-local destructors outlive any
        /// unload.
        // Some are the mark of the generation and are never called.
        #[allow(dead_code)]
        #[derive(Debug)]
        pub struct Library {
            path: std::path::PathBuf,
            abi_version: Option<u32>,
            $(
                #[doc = concat!("`", stringify!($name), "`, see [`abi::", stringify!($name), "`].")]
                pub(crate) $name: abi::$name,
            )*
        }

        impl Library {
            /// Names of the functions, in the order in which they are reported.
            pub const SYMBOLS: [&'static str; abi::FUNCTIONS] = [$(stringify!($name)),*];

            /// The functions, or the names of those that are missing.
            fn resolve(
                loaded: &$crate::vendor::library::Loaded,
            ) -> Result<Self, Vec<&'static str>> {
                let mut missing = Vec::new();
                $(
                    // SAFETY: abi.rs declares this symbol's type under its own name,
                    // and a library that is returned is never closed.
                    let $name = unsafe { loaded.function::<abi::$name>(stringify!($name)) };
                    if $name.is_none() {
                        missing.push(stringify!($name));
                    }
                )*
                match ($($name,)*) {
                    ($(Some($name),)*) => Ok(Self {
                        path: loaded.path_of(Self::SYMBOLS[0]),
                        abi_version: loaded.abi_version(),
                        $($name),*
                    }),
                    _ => Err(missing),
                }
            }

            /// The library's own `major.minor`, if it tells one \[pub\].
            pub fn abi_version(&self) -> Option<String> {
                self.abi_version.map($crate::vendor::library::major_minor)
            }

            /// The file that the dynamic linker took, or the name that was asked
            /// for where the system does not tell.
            pub fn path(&self) -> &std::path::Path {
                &self.path
            }
        }
    };
}
pub(crate) use symbols;

/// A library that was opened and is closed again unless it is kept.
pub(crate) struct Loaded {
    name: PathBuf,
    source: Source,
}

enum Source {
    Mapped(Mapped),
    Linked(Linked),
}

impl Loaded {
    /// Opens `name`, see [`open`].
    ///
    /// # Errors
    ///
    /// [`Error::LibraryUnavailable`] with the dynamic linker's own words.
    pub(crate) fn open(name: &Path) -> Result<Self, Error> {
        let mapped = open(name).map_err(|linker| Error::LibraryUnavailable {
            library: name.display().to_string(),
            linker,
        })?;
        Ok(Self {
            name: name.to_owned(),
            source: Source::Mapped(mapped),
        })
    }

    /// See [`function`].
    ///
    /// # Safety
    ///
    /// As there.
    pub(crate) unsafe fn function<F: Copy>(&self, name: &str) -> Option<F> {
        match &self.source {
            // SAFETY: the caller's conditions are the same.
            Source::Mapped(mapped) => unsafe { function(mapped, name) },
            Source::Linked(linked) => {
                let pointer = linked.find(name)?;
                debug_assert_eq!(size_of::<F>(), size_of_val(&pointer));
                // SAFETY: the caller vouches for F being a function pointer, and who
                // made `linked` for the function's type.
                Some(unsafe { std::mem::transmute_copy(&pointer) })
            }
        }
    }

    /// Whether it exports `name`.
    pub(crate) fn exports(&self, name: &str) -> bool {
        // SAFETY: the pointer is not called.
        unsafe { self.function::<unsafe extern "C" fn()>(name) }.is_some()
    }

    /// What the published revision says of itself \[pub\].
    pub(crate) fn abi_version(&self) -> Option<u32> {
        // SAFETY: the type is the published header's.
        let version = unsafe { self.function::<abi::smem_get_abi_version>("smem_get_abi_version") };
        // SAFETY: takes nothing, needs no initialisation and returns a constant
        // [pub]; the library is open.
        version.map(|version| unsafe { version() })
    }

    /// The file that the function `name` is in.
    pub(crate) fn path_of(&self, name: &str) -> PathBuf {
        // SAFETY: the pointer is not called.
        let function = unsafe { self.function::<unsafe extern "C" fn()>(name) };
        let file = function.and_then(|function| mapped_file(function as *const c_void));
        file.unwrap_or_else(|| self.name.clone())
    }

    /// Leaves it mapped until the process ends.
    pub(crate) fn keep(self) {
        let _mapped = ManuallyDrop::new(self.source);
    }

    /// The error about `missing` symbols; closes the library, so that a later
    /// attempt may find another file under the same name.
    pub(crate) fn lacks(
        self,
        wanted: Generation,
        functions: usize,
        missing: Vec<&'static str>,
    ) -> Error {
        let version = self.abi_version();
        Error::SymbolsMissing {
            library: self.name.display().to_string(),
            revision: revision(wanted, version, missing.len() == functions),
            advice: other_generation(wanted, version),
            missing,
        }
    }
}

fn revision(wanted: Generation, abi_version: Option<u32>, missing_all: bool) -> String {
    let age = match wanted {
        Generation::Batched => "an older, incompatible",
        Generation::V1 => "not the published 1.x",
    };
    match abi_version {
        Some(version) => format!("{age} revision (ABI version {})", major_minor(version)),
        None if missing_all => "not MemFabric's library".to_owned(),
        None => format!("{age} revision of MemFabric"),
    }
}

/// The fix, where the library looks like one of the other generation.
fn other_generation(wanted: Generation, abi_version: Option<u32>) -> &'static str {
    match (wanted, abi_version) {
        (Generation::Batched, Some(version)) if version >> 16 == 1 => {
            "; to use the published 1.x library, set transports/memfabric/abi to \"v1\" (MF_ABI=v1)"
        }
        (Generation::Batched, _) => "",
        (Generation::V1, _) => {
            "; for another library than the published 1.x one, leave transports/memfabric/abi (MF_ABI) out"
        }
    }
}

pub(crate) fn major_minor(version: u32) -> String {
    format!("{}.{}", version >> 16, version & 0xffff)
}

symbols! {
    smem_trans_init,
    smem_trans_uninit,
    smem_trans_config_init,
    smem_trans_create,
    smem_trans_destroy,
    smem_trans_get_rpc_port,
    smem_trans_register_mem,
    smem_trans_batch_register_mem,
    smem_trans_deregister_mem,
    smem_trans_batch_copy,
    smem_trans_batch_status_query,
    smem_trans_set_peer_down_callback,
    smem_set_log_level,
}

impl Library {
    /// Opens `name` and resolves all 13 symbols. No function of the library has
    /// been called when this returns, but for `smem_get_abi_version` where it is
    /// there, to name the revision.
    ///
    /// # Errors
    ///
    /// [`Error::LibraryUnavailable`] with the dynamic linker's own words if the
    /// file or a dependency is not there, is no shared object, is of another
    /// architecture or cannot be bound; [`Error::SymbolsMissing`] naming every
    /// missing symbol. A refused library is closed again, so that a later
    /// attempt may find another file under the same name.
    pub fn load(name: &Path) -> Result<Self, Error> {
        Self::of(Loaded::open(name)?)
    }

    /// The functions of a library that this program has linked in.
    ///
    /// # Errors
    ///
    /// [`Error::SymbolsMissing`].
    pub fn linked(linked: Linked) -> Result<Self, Error> {
        Self::of(Loaded {
            name: std::env::current_exe().unwrap_or_default(),
            source: Source::Linked(linked),
        })
    }

    fn of(loaded: Loaded) -> Result<Self, Error> {
        match Self::resolve(&loaded) {
            Ok(library) => {
                loaded.keep();
                Ok(library)
            }
            Err(missing) => Err(loaded.lacks(Generation::Batched, abi::FUNCTIONS, missing)),
        }
    }
}

/// The file that `address` is mapped from, as the kernel lists it.
fn mapped_file(address: *const c_void) -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    maps.lines().find_map(|line| {
        let (range, rest) = line.split_once(' ')?;
        let (start, end) = range.split_once('-')?;
        let start = usize::from_str_radix(start, 16).ok()?;
        let end = usize::from_str_radix(end, 16).ok()?;
        let path = &rest[rest.find('/')?..];
        (start..end)
            .contains(&(address as usize))
            .then(|| PathBuf::from(path))
    })
}
