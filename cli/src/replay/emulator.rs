//! The emulator's own functions, where the library is the emulator.
// Calls functions that only the emulator exports, through pointers.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char};
use std::path::{Path, PathBuf};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

/// Its file name, as cargo builds it.
const FILE: &str = "libmf_smem.so";

/// An emulated library that this process has open.
#[derive(Clone, Copy, Debug)]
pub struct Emulator {
    version: unsafe extern "C" fn() -> *const c_char,
    count: unsafe extern "C" fn(*const c_char) -> u64,
    violation: unsafe extern "C" fn(u64, *mut c_char, usize) -> usize,
}

impl Emulator {
    /// Where the emulator is that was built with this command: next to it, or in
    /// `deps`, where cargo leaves the libraries of a build.
    pub fn built_with_this_command() -> Option<PathBuf> {
        let folder = std::env::current_exe().ok()?.parent()?.to_owned();
        let places = [folder.join("deps").join(FILE), folder.join(FILE)];
        places.into_iter().find(|path| path.is_file())
    }

    /// The emulator's functions, if the library at `path` has them.
    pub fn find(path: &Path) -> Option<Self> {
        // SAFETY: the core has opened this library before, so that no initialiser
        // runs now.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.ok()?;
        // SAFETY: the emulator documents this signature under this name.
        let version = unsafe { library.get("mf_emu_version") }.ok();
        // SAFETY: as above.
        let count = unsafe { library.get("mf_emu_count") }.ok();
        // SAFETY: as above.
        let violation = unsafe { library.get("mf_emu_violation") }.ok();
        let found = Self {
            version: *version?,
            count: *count?,
            violation: *violation?,
        };
        // Its functions are to stay.
        std::mem::forget(library);
        Some(found)
    }

    /// What it says of itself.
    pub fn version(self) -> String {
        // SAFETY: takes nothing; the library is never closed.
        let text = unsafe { (self.version)() };
        // SAFETY: the answer is a terminated text that lives as long as the
        // library.
        let text = unsafe { CStr::from_ptr(text) };
        text.to_string_lossy().into_owned()
    }

    /// A counter of this process; 0 where the emulator has none of that name.
    pub fn count(self, name: &CStr) -> u64 {
        // SAFETY: reads the terminated name during the call.
        let count = unsafe { (self.count)(name.as_ptr()) };
        if count == u64::MAX { 0 } else { count }
    }

    /// The text of each contract violation of this process.
    pub fn violations(self) -> Vec<String> {
        (0..self.count(c"violations"))
            .map(|index| self.violation(index))
            .collect()
    }

    fn violation(self, index: u64) -> String {
        let mut text = [0_u8; 512];
        // SAFETY: writes at most that many bytes to the buffer, terminator
        // included.
        unsafe { (self.violation)(index, text.as_mut_ptr().cast(), text.len()) };
        let text = CStr::from_bytes_until_nul(&text).unwrap_or_default();
        text.to_string_lossy().into_owned()
    }
}
