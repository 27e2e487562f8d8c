// SPDX-License-Identifier: Apache-2.0
//! Link options of the shared library.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // A host that closes the library must not unmap it: the worker threads, and
    // the thread-local destructors of threads that called it, still run there.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libmf_smem.so");
}
