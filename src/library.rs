//! `libmf_smem.so`: opened through the dynamic linker, all 13 symbols or none.
// Opening a library runs its initialisers, and a symbol's type is our word.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};

use libloading::os::unix::{Library as Linked, RTLD_LOCAL, RTLD_NOW};

use crate::abi;
use crate::error::Error;

/// Opens `name` with every symbol bound at once, or tells the linker's words.
///
/// The name goes to the dynamic linker as it is, so a bare file name is looked
/// up in `LD_LIBRARY_PATH` as it was when the process started, the cache and
/// the default folders.
pub(crate) fn open(name: &Path) -> Result<Linked, String> {
    // SAFETY:
    // - initialisers: opening the library is what the user configured, and a
    //   vendor's library may be expected to load without breaking its host
    // - RTLD_LOCAL: its symbols interpose nobody else's
    unsafe { Linked::open(Some(name), RTLD_NOW | RTLD_LOCAL) }.map_err(|error| linker_words(&error))
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
pub(crate) unsafe fn function<F: Copy>(library: &Linked, name: &str) -> Option<F> {
    // SAFETY: the caller vouches for F; Option of a function pointer is what a
    // symbol that may be null is read as.
    let symbol = unsafe { library.get::<Option<F>>(name) };
    symbol.ok().and_then(|symbol| *symbol)
}

macro_rules! symbols {
    ($($name:ident),* $(,)?) => {
        /// The 13 functions. A value exists only when all of them were found.
        ///
        /// The file stays mapped until the process ends, whatever becomes of this
        /// value: the library's threads and thread-local destructors outlive any
        /// unload.
        #[derive(Debug)]
        pub struct Library {
            path: PathBuf,
            abi_version: Option<u32>,
            $(
                #[doc = concat!("`", stringify!($name), "`, see [`abi::", stringify!($name), "`].")]
                pub(crate) $name: abi::$name,
            )*
        }

        impl Library {
            /// Names of the functions, in the order in which they are reported.
            pub const SYMBOLS: [&'static str; abi::FUNCTIONS] = [$(stringify!($name)),*];

            fn resolve(linked: &Linked, path: PathBuf) -> Result<Self, Vec<&'static str>> {
                let mut missing = Vec::new();
                $(
                    // SAFETY: abi.rs declares this symbol's type under its own name,
                    // and `load` never closes a library that it returns.
                    let $name = unsafe { function::<abi::$name>(linked, stringify!($name)) };
                    if $name.is_none() {
                        missing.push(stringify!($name));
                    }
                )*
                match ($($name,)*) {
                    ($(Some($name),)*) => Ok(Self {
                        path,
                        abi_version: abi_version(linked),
                        $($name),*
                    }),
                    _ => Err(missing),
                }
            }
        }
    };
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
        let linked = open(name).map_err(|linker| Error::LibraryUnavailable {
            library: name.display().to_string(),
            linker,
        })?;
        match Self::resolve(&linked, name.to_owned()) {
            Ok(mut library) => {
                // Never closed, see the type.
                let _mapped = ManuallyDrop::new(linked);
                if let Some(path) = mapped_file(library.smem_trans_init as *const c_void) {
                    library.path = path;
                }
                Ok(library)
            }
            Err(missing) => Err(Error::SymbolsMissing {
                library: name.display().to_string(),
                missing,
                abi_version: abi_version(&linked),
            }),
        }
    }

    /// The library's own `major.minor`, if it tells one \[pub\].
    pub fn abi_version(&self) -> Option<String> {
        let version = self.abi_version?;
        Some(format!("{}.{}", version >> 16, version & 0xffff))
    }

    /// The file that the dynamic linker took, or the name that was asked for
    /// where the system does not tell.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// What the published revision says of itself \[pub\].
fn abi_version(linked: &Linked) -> Option<u32> {
    // SAFETY: the type is the published header's; `linked` is open until the
    // caller returns.
    let version = unsafe { function::<abi::smem_get_abi_version>(linked, "smem_get_abi_version") };
    // SAFETY: takes nothing, needs no initialisation and returns a constant [pub].
    version.map(|version| unsafe { version() })
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
