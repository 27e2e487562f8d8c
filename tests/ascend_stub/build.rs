// SPDX-License-Identifier: Apache-2.0
//! Link options of the shared library.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // Thread-local state outlives a dlclose.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
