// SPDX-License-Identifier: Apache-2.0
//! Link options of the shared library.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // Memory that it handed out, and thread-local state, outlive a dlclose.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libascendcl.so");
}
