// SPDX-License-Identifier: Apache-2.0
//! Compiles the bridge and the part of `cpp/` that needs no TENT header into the
//! static library.

fn main() {
    cxx_build::bridge("src/bridge.rs")
        .file("cpp/log_sink.cpp")
        .include("include")
        .std("c++20")
        .compile("memfabric_bridge");
    for input in [
        "src/bridge.rs",
        "cpp/log_sink.cpp",
        "include/memfabric/log_sink.h",
    ] {
        println!("cargo::rerun-if-changed={input}");
    }
}
