// SPDX-License-Identifier: Apache-2.0
//! `Library` against libraries that are not what they should be.
//!
//! The libraries are made by the tests with the system's C compiler. Every
//! function in them ends the process, so a test also fails if one is called.
#![allow(missing_docs)]

mod common;

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::emulator::{Process, built, config_with, say};
use memfabric_transport::vendor::v1;
use memfabric_transport::{Error, Library, Status, Transport};
use tempfile::TempDir;

const REAL_LIBRARY: &str = "MEMFABRIC_PUBLISHED_LIBRARY";

/// Compiles `source` into `folder/name`.
fn compile(folder: &Path, name: &str, source: &str, flags: &[&str]) -> PathBuf {
    let library = folder.join(name);
    let file = library.with_extension("c");
    fs::write(&file, source).expect("the folder is ours");
    let compiler = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
    let status = Command::new(compiler)
        .args(["-shared", "-fPIC", "-o"])
        .args([&library, &file])
        .args(flags)
        .status()
        .expect("a C compiler is installed");
    assert!(status.success(), "{name} does not compile");
    library
}

/// Functions that end the process when called.
fn functions(names: impl IntoIterator<Item = &'static str>) -> String {
    names
        .into_iter()
        .fold("void abort(void);\n".to_owned(), |mut source, name| {
            writeln!(source, "int {name}(void) {{ abort(); }}").expect("writing to a string");
            source
        })
}

fn folder() -> TempDir {
    tempfile::tempdir().expect("there is room for a folder")
}

fn unavailable(library: &Path) -> String {
    let error = Library::load(library).expect_err("unusable");
    assert_eq!(error.status(), Status::DeviceNotFound);
    let text = error.to_string();
    assert!(text.contains("unavailable: "), "{text}");
    assert!(text.contains("LD_LIBRARY_PATH"), "what to do: {text}");
    text
}

#[test]
fn case_02_each_of_the_13_symbols_is_missed_by_name() {
    let folder = folder();
    for missing in Library::SYMBOLS {
        let others = Library::SYMBOLS.into_iter().filter(|name| *name != missing);
        let name = format!("lib_without_{missing}.so");
        let library = compile(folder.path(), &name, &functions(others), &[]);
        let error = Library::load(&library).expect_err("13 or none");
        assert_eq!(error.status(), Status::DeviceNotFound);
        match error {
            Error::SymbolsMissing { missing: found, .. } => assert_eq!(found, [missing]),
            other => panic!("{other}"),
        }
    }
}

#[test]
fn case_02_an_older_revision_is_named_with_all_that_it_lacks() {
    let folder = folder();
    let lacking = [
        "smem_trans_get_rpc_port",
        "smem_trans_batch_copy",
        "smem_trans_batch_status_query",
    ];
    let mut source = functions(
        Library::SYMBOLS
            .into_iter()
            .filter(|name| !lacking.contains(name)),
    );
    source += "unsigned smem_get_abi_version(void) { return 0x00010003; }\n";
    let library = compile(folder.path(), "libmf_smem.so", &source, &[]);
    let text = Library::load(&library)
        .expect_err("an older revision")
        .to_string();
    for part in lacking
        .into_iter()
        .chain(["older, incompatible revision", "ABI version 1.3"])
    {
        assert!(text.contains(part), "{part} in {text}");
    }
}

#[test]
fn case_02_a_good_library_loads_after_a_refused_one_of_the_same_name() {
    let folder = folder();
    let library = compile(
        folder.path(),
        "libmf_smem.so",
        &functions([]),
        &["-Wl,-soname,libmf_smem.so"],
    );
    let text = Library::load(&library).expect_err("empty").to_string();
    assert!(text.contains("not MemFabric's library"), "{text}");
    let good = Library::load(&built("libmf_smem.so")).expect("the emulator has all 13");
    assert_eq!(good.path(), built("libmf_smem.so"));
}

#[test]
fn all_13_symbols_resolve_without_one_being_called() {
    let folder = folder();
    let library = compile(
        folder.path(),
        "complete.so",
        &functions(Library::SYMBOLS),
        &[],
    );
    let loaded = Library::load(&library).expect("complete");
    let expected = fs::canonicalize(&library).expect("it exists");
    assert_eq!(loaded.path(), expected);
}

#[test]
fn each_of_the_published_symbols_is_missed_by_name() {
    let folder = folder();
    for missing in v1::Library::SYMBOLS {
        let all = v1::Library::SYMBOLS.into_iter();
        let source = functions(all.filter(|name| *name != missing));
        let library = compile(folder.path(), &format!("lib_v1_{missing}.so"), &source, &[]);
        match v1::Library::load(&library).expect_err("15 or none") {
            Error::SymbolsMissing { missing: found, .. } => assert_eq!(found, [missing]),
            other => panic!("{other}"),
        }
    }
}

#[test]
fn a_later_library_that_kept_the_published_symbols_is_not_taken_for_it() {
    let folder = folder();
    let mut names: Vec<_> = v1::Library::SYMBOLS.into();
    let library = compile(folder.path(), "old.so", &functions(names.clone()), &[]);
    v1::Library::load(&library).expect("complete");
    names.push("smem_trans_batch_copy");
    let library = compile(folder.path(), "both.so", &functions(names), &[]);
    let error = v1::Library::load(&library).expect_err("its functions take other arguments");
    assert_eq!(error.status(), Status::DeviceNotFound);
    let text = error.to_string();
    for part in ["both.so exports smem_trans_batch_copy", "(MF_ABI) out"] {
        assert!(text.contains(part), "{part} in {text}");
    }
}

#[test]
fn the_emulator_is_refused_where_the_published_library_is_asked_for() {
    let config = config_with(&[
        ("MF_PROTOCOL", "host_rdma"),
        ("MF_ABI", "v1"),
        ("MF_CONFIG_STORE_URL", "tcp://127.0.0.1:12000"),
        ("MF_ROLE", "sender"),
    ]);
    let error = Transport::new()
        .install(&config)
        .expect_err("it is of the other generation");
    assert_eq!(error.status(), Status::DeviceNotFound);
    let text = error.to_string();
    for part in [
        "not the published 1.x revision",
        "missing smem_trans_batch_write, smem_trans_batch_read",
        "smem_create_config_store",
        "leave transports/memfabric/abi (MF_ABI) out",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
}

#[test]
fn case_01_a_missing_dependency_is_what_the_message_names() {
    let folder = folder();
    compile(folder.path(), "libmf_hybm_core.so", "int hybm;", &[]);
    let here = folder.path().display().to_string();
    let library = compile(
        folder.path(),
        "libmf_smem.so",
        &functions(Library::SYMBOLS),
        &["-Wl,--no-as-needed", "-L", &here, "-lmf_hybm_core"],
    );
    fs::remove_file(folder.path().join("libmf_hybm_core.so")).expect("it was made");
    let text = unavailable(&library);
    assert!(
        text.contains("libmf_hybm_core.so: cannot open shared object file"),
        "{text}"
    );
}

#[test]
fn case_01_a_missing_file_is_named() {
    let text = unavailable(Path::new("libmf_smem_nowhere.so"));
    assert!(
        text.starts_with("libmf_smem_nowhere.so unavailable: "),
        "{text}"
    );
    assert!(text.contains("cannot open shared object file"), "{text}");
}

#[test]
fn case_01_too_little_static_tls_is_what_the_message_says() {
    let folder = folder();
    let source = functions(Library::SYMBOLS)
        + "__attribute__((tls_model(\"initial-exec\"))) __thread char big[4 << 20];\n\
           char *touch(void) { return big; }\n";
    let library = compile(folder.path(), "libmf_smem.so", &source, &[]);
    let text = unavailable(&library);
    assert!(text.contains("static TLS"), "{text}");
}

#[test]
fn a_file_that_is_no_shared_object_brings_the_linkers_words() {
    let folder = folder();
    let text_file = folder.path().join("text.so");
    fs::write(&text_file, "not a library\n".repeat(100)).expect("the folder is ours");
    assert!(unavailable(&text_file).contains("invalid ELF header"));

    let empty = folder.path().join("empty.so");
    fs::write(&empty, "").expect("the folder is ours");
    assert!(unavailable(&empty).contains("file too short"));

    let foreign = compile(
        folder.path(),
        "foreign.so",
        &functions(Library::SYMBOLS),
        &[],
    );
    let mut bytes = fs::read(&foreign).expect("just compiled");
    // e_machine, of an architecture that nobody runs this on.
    bytes[18..20].copy_from_slice(&0x2au16.to_ne_bytes());
    fs::write(&foreign, bytes).expect("the folder is ours");
    let text = unavailable(&foreign);
    assert!(
        text.contains("foreign.so") && text.contains("unavailable"),
        "{text}"
    );

    let text = unavailable(folder.path());
    assert!(text.contains("cannot read file data"), "{text}");
}

#[test]
fn a_library_whose_initialiser_cannot_be_bound_brings_the_linkers_words() {
    let folder = folder();
    let source = functions(Library::SYMBOLS)
        + "void set_up_by_a_newer_driver(void);\n\
           __attribute__((constructor)) void start(void) { set_up_by_a_newer_driver(); }\n";
    let library = compile(folder.path(), "libmf_smem.so", &source, &[]);
    let text = unavailable(&library);
    assert!(
        text.contains("undefined symbol: set_up_by_a_newer_driver"),
        "{text}"
    );
}

#[test]
fn case_01_a_search_path_set_too_late_does_not_count() {
    let folder = folder();
    compile(
        folder.path(),
        "libmf_smem_late.so",
        &functions(Library::SYMBOLS),
        &[],
    );
    let mut process = Process::start_with("late_search_path", |command| {
        command
            .env_remove("LD_LIBRARY_PATH")
            .env("LATE_FOLDER", folder.path());
    });
    let text = process.hear();
    process.end();
    assert!(
        text.contains("libmf_smem_late.so: cannot open shared object file"),
        "{text}"
    );
    assert!(text.contains("before the process starts"), "{text}");
}

#[test]
#[ignore = "the other process of case_01_a_search_path_set_too_late_does_not_count"]
#[allow(unsafe_code)]
fn late_search_path() {
    let folder = std::env::var_os("LATE_FOLDER").expect("the parent sets it");
    // SAFETY: no other thread of this process touches the environment.
    unsafe { std::env::set_var("LD_LIBRARY_PATH", folder) };
    let error = Library::load(Path::new("libmf_smem_late.so")).expect_err("too late");
    say(&error.to_string());
}

/// The wheel `memfabric-hybrid` 1.3.0, where the environment names its
/// `libmf_smem.so`.
#[test]
fn the_published_library_is_refused_with_all_three_missing_symbols() {
    let Some(library) = std::env::var_os(REAL_LIBRARY) else {
        println!("skipped: {REAL_LIBRARY} does not name the published libmf_smem.so");
        return;
    };
    let folder = Path::new(&library)
        .parent()
        .expect("it is in a folder")
        .to_owned();
    let mut process = Process::start_with("published_library", |command| {
        command.env("LD_LIBRARY_PATH", folder);
    });
    let text = process.hear();
    let threads = process.hear();
    process.end();
    for part in [
        "smem_trans_get_rpc_port, smem_trans_batch_copy, smem_trans_batch_status_query",
        "older, incompatible revision",
        "ABI version 1.3",
        "set transports/memfabric/abi to \"v1\" (MF_ABI=v1)",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
    assert_eq!(threads, "no new thread", "a library at work has threads");
}

#[test]
#[ignore = "the other process of the_published_library_is_refused_…"]
fn published_library() {
    let library = std::env::var_os(REAL_LIBRARY).expect("the parent has it");
    let threads = || fs::read_dir("/proc/self/task").expect("Linux").count();
    let before = threads();
    let error = Library::load(Path::new(&library)).expect_err("it lacks three symbols");
    let new = threads() - before;
    say(&error.to_string());
    say(if new == 0 {
        "no new thread"
    } else {
        "new threads"
    });
}
