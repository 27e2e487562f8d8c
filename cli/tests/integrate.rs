// SPDX-License-Identifier: Apache-2.0
//! `memfabric integrate`, on small checkouts that have Mooncake's anchors in the
//! places and shapes of several generations.
//!
//! The damaged ones at the end are the same in each run; more of them with
//! `PROPTEST_CASES=10000 cargo test --release --locked --test integrate damaged`.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use memfabric::integrate::edits::{EDITS, Edit, MARK, Place, When};
use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::RngSeed;

const TENT: &str = "mooncake-transfer-engine/tent";
const TYPES: &str = "mooncake-transfer-engine/tent/include/tent/common/types.h";
const C_API: &str = "mooncake-transfer-engine/tent/include/tent/transfer_engine.h";
const TRANSPORTS: &str = "mooncake-transfer-engine/tent/src/transport/CMakeLists.txt";
const SELECTOR_TEST: &str = "mooncake-transfer-engine/tent/tests/transport_selector_test.cpp";
const VALIDATION: &str = "mooncake-transfer-engine/tent/src/common/config_validation.cpp";

/// A generation of Mooncake, as far as it matters here.
#[derive(Clone, Copy, Debug)]
struct Generation {
    /// Its transport types behind TPU.
    newest: &'static [&'static str],
    /// Whether its own test pins the number of types.
    pins_the_count: bool,
    /// Whether it validates configurations.
    validates: bool,
    /// What the integer of `MEMFABRIC` becomes.
    value: usize,
}

/// 2026-07-23, the oldest supported.
const OLDEST: Generation = Generation {
    newest: &[],
    pins_the_count: false,
    validates: false,
    value: 11,
};

/// 2026-08-22.
const PINNED: Generation = Generation {
    newest: &["UB", "MPCOMM"],
    pins_the_count: true,
    validates: false,
    value: 13,
};

/// Later.
const VALIDATED: Generation = Generation {
    newest: &["UB", "MPCOMM", "HP_TCP", "XPU"],
    pins_the_count: true,
    validates: true,
    value: 15,
};

const GENERATIONS: [Generation; 3] = [OLDEST, PINNED, VALIDATED];

impl Generation {
    fn files(self) -> BTreeMap<String, String> {
        let mut files = BTreeMap::new();
        let mut add = |path: &str, text: String| files.insert(path.to_owned(), text);
        let lines = |format: &dyn Fn(usize, &str) -> String| -> String {
            self.newest
                .iter()
                .enumerate()
                .map(|(index, name)| format(index + 11, name))
                .collect()
        };

        add("CMakeLists.txt", "project(mooncake)\n".to_owned());
        add(".git/index", "not to be touched\n".to_owned());
        add(
            "mooncake-common/common.cmake",
            "option(USE_ASCEND \"HCCL\" OFF)\n\
             option(USE_TENT \"option for building Mooncake TENT\" OFF)\n\
             option(USE_LRU_MASTER \"LRU\" OFF)\n\
             if(USE_TPU)\n  if(NOT USE_TENT)\n    message(FATAL_ERROR \"no\")\n  endif()\nendif()\n"
                .to_owned(),
        );
        add(
            TYPES,
            format!(
                "enum TransportType : int {{\n    UNSPEC = 0,\n    RDMA,\n    MNNVL,\n    SHM,\n    \
                 NVLINK,\n    GDS,\n    IOURING,\n    TCP,  // and its like\n    AscendDirect,\n    \
                 SUNRISE_LINK,\n    TPU,\n{}    // Sentinel: must remain the last enumerator.\n    \
                 kNumTransportTypes,\n}};\n\n\
                 inline const char* transportTypeName(TransportType type) {{\n    \
                 switch (type) {{\n        case TCP:\n            return \"tcp\";\n        \
                 case kNumTransportTypes:\n            return \"unknown\";\n    }}\n}}\n\n\
                 inline TransportType parseTransportType(const std::string& str) {{\n    \
                 if (str == \"tcp\") return TCP;\n    if (str == \"ascend\") return AscendDirect;\n    \
                 return UNSPEC;\n}}\n",
                lines(&|_, name| format!("    {name},\n")),
            ),
        );
        add(
            &format!("{TENT}/src/runtime/transport_loader.cpp"),
            "#include \"tent/transport/tcp/tcp_transport.h\"\n\n#ifdef USE_TPU\n\
             #include \"tent/transport/tpu/tpu_transport.h\"\n#endif\n\n\
             namespace mooncake {\nnamespace tent {\n\n\
             Status TransferEngineImpl::loadTransports() {\n    load(TCP);\n\n    \
             return Status::OK();\n}\n\n}  // namespace tent\n}  // namespace mooncake\n"
                .to_owned(),
        );
        add(
            &format!("{TENT}/src/runtime/transfer_engine_impl.cpp"),
            "void f() {\n    if (transport_list_[MNNVL]) result.push_back(MNNVL);\n    \
             if (transport_list_[RDMA]) result.push_back(RDMA);\n    \
             if (transport_list_[TCP]) result.push_back(TCP);\n}\n"
                .to_owned(),
        );
        add(
            &format!("{TENT}/src/runtime/platform.cpp"),
            "#ifdef USE_CUDA\n#include \"tent/platform/cuda.h\"\n#else\n\
             #include \"tent/platform/cpu.h\"\n#endif\n\nvoid f() {\n#ifdef USE_CUDA\n        \
             g_instance = std::make_shared<CudaPlatform>(conf);\n#else\n        \
             g_instance = std::make_shared<CpuPlatform>(conf);\n#endif\n}\n"
                .to_owned(),
        );
        let targets = "foreach(\n  tgt\n  tent_xport_tcp\n  tent_xport_ascend_direct\n  \
                       tent_xport_tpu)\nendforeach()\n";
        add(
            TRANSPORTS,
            format!(
                "add_subdirectory(tcp)\n\nadd_library(tent_transport_all INTERFACE)\n{targets}"
            ),
        );
        add(
            &format!("{TENT}/src/CMakeLists.txt"),
            format!("add_library(tent_link_group INTERFACE)\n{targets}"),
        );
        add(
            &format!("{TENT}/tests/CMakeLists.txt"),
            "add_test(NAME first COMMAND first)\n".to_owned(),
        );
        let count = match self.pins_the_count {
            true => format!(
                "    EXPECT_EQ(static_cast<int>(kNumTransportTypes), {});\n",
                self.value
            ),
            false => String::new(),
        };
        add(SELECTOR_TEST, format!("TEST(A, B) {{\n{count}}}\n"));
        add(
            C_API,
            format!(
                "#define TRANSPORT_UNSPEC (0)\n#define TRANSPORT_TPU (10)\n{}\n\
                 struct tent_memory_options {{\n    char location[64];\n}};\n",
                lines(&|value, name| format!("#define TRANSPORT_{name} ({value})\n")),
            ),
        );
        add(
            &format!("{TENT}/src/python/pybind.cpp"),
            "    enumeration(m, \"TransportType\")\n        \
             .value(\"AscendDirect\", TransportType::AscendDirect)\n        .export_values();\n"
                .to_owned(),
        );
        if self.validates {
            add(
                VALIDATION,
                "constexpr std::string_view kTransports[] = {\n    \"tcp\", \"shm\"};\n\n\
                 ConfigValidationContext currentConfigValidationContext() {\n    \
                 ConfigValidationContext context{{\"tcp\", \"shm\"}};\n#ifdef USE_TPU\n    \
                 context.compiled_transports.push_back(\"tpu\");\n#endif\n    \
                 return context;\n}\n"
                    .to_owned(),
            );
        }
        add(
            "mooncake-transfer-engine/benchmark/tent_backend.cpp",
            "        map = {\n            {\"rdma\", \"rdma\"},\n            \
             {\"tcp\", \"tcp\"},\n            {\"shm\", \"shm\"}};\n\n    \
             if (xport_type == \"tcp\") return TCP;\n    return UNSPEC;\n"
                .to_owned(),
        );
        add(
            "mooncake-transfer-engine/benchmark/utils.cpp",
            "DEFINE_string(xport_type, \"\",\n              \
             \"Transport type: rdma|shm|gds\");\nDEFINE_string(\n    hint, \"unspec\",\n    \
             \"the hint. \"\n    \"unspec|rdma|tcp|shm|gds\");\n"
                .to_owned(),
        );
        add(
            "mooncake-store/src/real_client.cpp",
            "            CuMemFabricHandle handle;\n            \
             if (this->protocol == \"ascend\" || this->protocol == \"ubshmem\") {\n                \
             a();\n            } else {\n                b();\n            }\n"
                .to_owned(),
        );
        add(
            "mooncake-store/include/utils.h",
            "constexpr size_t SZ_2MB = 2 * 1024 * 1024;\n\
             constexpr size_t SZ_1GB = 1024 * 1024 * 1024;\n\n        \
             if (parsed_size == SZ_2MB || parsed_size == SZ_1GB) {\n            size = parsed_size;\n        \
             } else {\n            LOG(WARNING) << size_env\n                         \
             << \"'. Supported: 2MB, 1GB. Fallback to 2MB.\";\n        }\n\n        \
             if (size == SZ_2MB) {\n            two();\n        \
             } else if (size == SZ_1GB) {\n            one();\n        }\n        \
             LOG(INFO) << (size == SZ_2MB ? \"2MB\" : \"1GB\");\n"
                .to_owned(),
        );
        add(
            "mooncake-store/src/utils.cpp",
            "    if (page_size == SZ_2MB) {\n        two();\n    \
             } else if (page_size == SZ_1GB) {\n        one();\n    }\n"
                .to_owned(),
        );
        files
    }
}

/// A checkout of the test's own, with this transport's sources beside it.
struct Checkout {
    _place: tempfile::TempDir,
    root: PathBuf,
    source: PathBuf,
}

impl Checkout {
    fn new(generation: Generation) -> Self {
        Self::with(generation.files())
    }

    fn with(files: BTreeMap<String, String>) -> Self {
        let place = tempfile::tempdir().expect("a directory of the test's own");
        let real = fs::canonicalize(place.path()).expect("it is there");
        let checkout = Self {
            root: real.join("Mooncake"),
            source: real.join("transport"),
            _place: place,
        };
        for (path, text) in files {
            checkout.write(&path, &text);
        }
        make_source(&checkout.source);
        checkout
    }

    fn path(&self, file: &str) -> PathBuf {
        self.root.join(file)
    }

    fn read(&self, file: &str) -> String {
        fs::read_to_string(self.path(file)).unwrap_or_else(|error| panic!("{file}: {error}"))
    }

    fn write(&self, file: &str, text: &str) {
        let path = self.path(file);
        fs::create_dir_all(path.parent().expect("has a parent")).expect("makes directories");
        fs::write(path, text).unwrap_or_else(|error| panic!("{file}: {error}"));
    }

    /// Every file's bytes.
    fn snapshot(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        let mut files = BTreeMap::new();
        let mut directories = vec![self.root.clone()];
        while let Some(directory) = directories.pop() {
            for entry in fs::read_dir(directory).expect("lists") {
                let path = entry.expect("lists").path();
                if path.is_dir() {
                    directories.push(path);
                } else {
                    let bytes = fs::read(&path).unwrap_or_default();
                    files.insert(path, bytes);
                }
            }
        }
        files
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_memfabric"));
        command.arg("integrate").arg(&self.root).args(arguments);
        command
    }

    fn run(&self, arguments: &[&str]) -> Run {
        Run::of(&mut self.command(arguments))
    }

    /// Integrates with the sources beside the checkout.
    fn integrate(&self) -> Run {
        self.run(&["--source", self.source.to_str().expect("is text")])
    }

    fn check(&self) -> i32 {
        self.run(&["--check"]).status
    }
}

/// What a run of the command came to.
struct Run {
    status: i32,
    out: String,
    error: String,
}

impl Run {
    fn of(command: &mut Command) -> Self {
        let Output {
            status,
            stdout,
            stderr,
        } = command.output().expect("the command starts");
        Self {
            status: status.code().expect("the command ends by itself"),
            out: String::from_utf8(stdout).expect("prints text"),
            error: String::from_utf8(stderr).expect("prints text"),
        }
    }

    #[track_caller]
    fn succeeds(self) -> Self {
        assert_eq!(self.status, 0, "{}{}", self.out, self.error);
        self
    }

    /// It was refused, and said each of `words`.
    #[track_caller]
    fn refused(self, words: &[&str]) {
        assert_eq!(self.status, 2, "{}{}", self.out, self.error);
        for word in words {
            assert!(self.error.contains(word), "no {word:?} in: {}", self.error);
        }
    }
}

/// Sources that the command takes for this transport's.
fn make_source(directory: &Path) {
    fs::create_dir_all(directory).expect("makes directories");
    let manifest = "[package]\nname = \"memfabric-transport\"\n";
    fs::write(directory.join("Cargo.toml"), manifest).expect("writes");
    fs::write(directory.join("CMakeLists.txt"), "").expect("writes");
}

/// What a build cannot see: an engine that calls the method otherwise.
#[test]
fn c02_the_check_says_whether_the_engine_declares_quiesce() {
    const HEADER: &str = "mooncake-transfer-engine/tent/include/tent/runtime/transport.h";
    let checkout = Checkout::new(VALIDATED);
    checkout.integrate().succeeds();
    let says = || checkout.run(&["--check"]).succeeds().out;
    assert!(says().contains("teardown: not known"), "{}", says());
    for (declaration, declared) in [
        (
            "    virtual Status quiesce() { return Status::OK(); }\n",
            true,
        ),
        ("    virtual Status quiesce ();\n", true),
        ("    virtual Status quiesceAll() {}\n", false),
        ("    virtual Status try_quiesce() {}\n", false),
        ("    virtual Status drain() {}  // once quiesce()\n", false),
        ("", false),
    ] {
        checkout.write(HEADER, &format!("class Transport {{\n{declaration}}};\n"));
        let out = says();
        assert_eq!(
            out.contains("the engine calls Transport::quiesce()"),
            declared,
            "{declaration}{out}"
        );
        assert_eq!(out.contains("declares no quiesce()"), !declared, "{out}");
    }
}

#[test]
fn a_checkout_is_integrated_once_and_comes_back_to_the_byte() {
    for generation in GENERATIONS {
        let checkout = Checkout::new(generation);
        let before = checkout.snapshot();
        assert_eq!(checkout.check(), 1, "{generation:?}");

        checkout.integrate().succeeds();
        let integrated = checkout.snapshot();
        assert_eq!(checkout.check(), 0, "{generation:?}");
        assert_eq!(
            before.keys().collect::<Vec<_>>(),
            integrated.keys().collect::<Vec<_>>(),
            "no file comes or goes"
        );

        let again = checkout.integrate().succeeds();
        assert!(again.out.contains("already"), "{}", again.out);
        assert!(checkout.snapshot() == integrated, "{generation:?}");

        checkout.run(&["--revert"]).succeeds();
        assert!(checkout.snapshot() == before, "{generation:?}");
        assert_eq!(checkout.check(), 1, "{generation:?}");
        checkout.run(&["--revert"]).succeeds();
        assert!(checkout.snapshot() == before, "{generation:?}");
    }
}

#[test]
fn every_edit_of_the_table_goes_in_where_there_is_a_place_for_it() {
    for generation in GENERATIONS {
        let checkout = Checkout::new(generation);
        checkout.integrate().succeeds();
        for edit in EDITS {
            let head = edit.text.split('{').next().expect("has a head");
            let head = if edit.text.contains("{source}") || edit.text.contains("{value}") {
                head
            } else {
                edit.text
            };
            let due = match edit.when {
                When::Always => true,
                When::FileExists => generation.validates,
                When::FileHas(_) => edit.file != SELECTOR_TEST || generation.pins_the_count,
            };
            let there = checkout.path(edit.file).exists()
                && checkout.read(edit.file).matches(head).count() == 1;
            assert_eq!(there, due, "{} in {generation:?}", edit.name);
        }
    }
}

#[test]
fn what_goes_in_says_what_mooncake_needs_to_hear() {
    let checkout = Checkout::new(VALIDATED);
    checkout.integrate().succeeds();
    let expectations = [
        (
            "mooncake-common/common.cmake",
            "option(USE_MEMFABRIC \"option for using MemFabric transport in TENT\" OFF)\n",
        ),
        (
            TYPES,
            "    XPU,\n    // Added by \"memfabric integrate\", last so that no other value moves.\n    MEMFABRIC,\n    // Sentinel",
        ),
        (
            TYPES,
            "        case MEMFABRIC:  // memfabric integrate\n            return \"memfabric\";\n        case kNum",
        ),
        (
            TYPES,
            "return TCP;\n    if (str == \"memfabric\") return MEMFABRIC;",
        ),
        (
            "mooncake-transfer-engine/tent/src/runtime/transport_loader.cpp",
            "#endif\n\n#ifdef USE_MEMFABRIC  // memfabric integrate\n#include \"tent/transport/memfabric/memfabric_transport.h\"\n#endif\n\nnamespace mooncake {\n",
        ),
        (
            "mooncake-transfer-engine/tent/src/runtime/transport_loader.cpp",
            "    if (conf_->get(\"transports/memfabric/enable\", false))\n        transport_list_[MEMFABRIC] = std::make_shared<MemFabricTransport>();\n#endif\n\n    return Status::OK();\n",
        ),
        (
            "mooncake-transfer-engine/tent/src/runtime/transfer_engine_impl.cpp",
            "result.push_back(MEMFABRIC);\n    if (transport_list_[RDMA])",
        ),
        (
            "mooncake-transfer-engine/tent/src/runtime/platform.cpp",
            "#include \"tent/platform/npu.h\"\n#else\n#include \"tent/platform/cpu.h\"\n",
        ),
        (
            "mooncake-transfer-engine/tent/src/runtime/platform.cpp",
            "std::make_shared<NpuPlatform>(conf);\n#else\n        g_instance = std::make_shared<CpuPlatform>",
        ),
        (
            SELECTOR_TEST,
            "EXPECT_EQ(static_cast<int>(kNumTransportTypes), 1 /* memfabric integrate */ + 15);",
        ),
        (
            C_API,
            "#define TRANSPORT_XPU (14)\n#define TRANSPORT_MEMFABRIC (15)",
        ),
        (
            VALIDATION,
            "kTransports[] = {\n    \"memfabric\",  // memfabric integrate\n    \"tcp\"",
        ),
        (
            VALIDATION,
            "#endif\n#ifdef USE_MEMFABRIC  // memfabric integrate\n    context.compiled_transports.push_back(\"memfabric\");\n#endif\n    return context;\n",
        ),
        (
            "mooncake-store/src/real_client.cpp",
            "            if ((this->protocol == \"ascend\" || this->protocol == \"ubshmem\") &&\n                !should_use_hugepage) {\n                a();",
        ),
        (
            "mooncake-store/include/utils.h",
            "parsed_size == SZ_512MB) {",
        ),
    ];
    for (file, text) in expectations {
        let whole = checkout.read(file);
        assert!(whole.contains(text), "{file}: no {text:?} in\n{whole}");
    }
}

#[test]
fn the_integer_is_the_enumerators_position() {
    for generation in GENERATIONS {
        let checkout = Checkout::new(generation);
        let run = checkout.integrate().succeeds();
        let value = generation.value;
        assert!(
            run.out.contains(&format!("MEMFABRIC: {value}\n")),
            "{}",
            run.out
        );
        let line = format!("#define TRANSPORT_MEMFABRIC ({value}) ");
        assert!(checkout.read(C_API).contains(&line), "{generation:?}");
    }
}

#[test]
fn an_enumerator_that_upstream_adds_later_is_noticed() {
    let checkout = Checkout::new(PINNED);
    checkout.integrate().succeeds();
    let types = checkout.read(TYPES);
    checkout.write(
        TYPES,
        &types.replace("    MPCOMM,\n", "    MPCOMM,\n    XPU,\n"),
    );
    let run = checkout.run(&["--check"]);
    assert_eq!(run.status, 3, "{}", run.out);
    assert!(
        run.out.contains("is 13, TransportType::MEMFABRIC is 14"),
        "{}",
        run.out
    );
    checkout
        .integrate()
        .refused(&["is 13", "is 14", "--revert"]);
    checkout.run(&["--revert"]).succeeds();
    let run = checkout.integrate().succeeds();
    assert!(run.out.contains("MEMFABRIC: 14\n"), "{}", run.out);
}

#[test]
fn enumerators_that_cannot_be_counted_are_refused() {
    let checkout = Checkout::new(PINNED);
    let types = checkout.read(TYPES);
    checkout.write(
        TYPES,
        &types.replace("    TPU,\n", "    TPU = SUNRISE_LINK + 1,\n"),
    );
    let before = checkout.snapshot();
    checkout.integrate().refused(&["types.h", "TransportType"]);
    assert!(checkout.snapshot() == before);
}

#[test]
fn line_endings_stay_what_they_are() {
    let to_crlf = |text: &String| text.replace('\n', "\r\n");
    // Every other line only.
    let mixed = |text: &String| -> String {
        text.split_inclusive('\n')
            .enumerate()
            .map(|(index, line)| match index % 2 {
                0 => line.replace('\n', "\r\n"),
                _ => line.to_owned(),
            })
            .collect()
    };
    let unended = |text: &String| text.trim_end().to_owned() + "\n\n  ";
    let cut = |text: &String| text.trim_end().to_owned();
    type Change<'a> = (&'a str, &'a dyn Fn(&String) -> String);
    let changes: [Change; 4] = [
        ("CRLF", &to_crlf),
        ("mixed", &mixed),
        ("blanks at the end", &unended),
        ("CRLF, cut", &|text| cut(&to_crlf(text))),
    ];
    for (name, change) in changes {
        let mut files = VALIDATED.files();
        for (path, text) in &mut files {
            // The cut goes through no anchor but the last line of the file.
            if !name.contains("cut") || path.ends_with("tests/CMakeLists.txt") {
                *text = change(text);
            }
        }
        let checkout = Checkout::with(files);
        let before = checkout.snapshot();
        checkout.integrate().succeeds();
        assert_eq!(checkout.check(), 0, "{name}");
        if name == "CRLF" {
            for edit in EDITS {
                let text = checkout.read(edit.file);
                let bare = text.replace("\r\n", "").contains('\n');
                assert!(!bare, "{}: a bare newline among CRLF", edit.file);
            }
        }
        checkout.run(&["--revert"]).succeeds();
        assert!(checkout.snapshot() == before, "{name}");
    }
}

#[test]
fn the_diff_is_what_integrating_changes() {
    let shown = Checkout::new(VALIDATED);
    let before = shown.snapshot();
    let source = shown.source.to_str().expect("is text");
    let diff = shown.run(&["--diff", "--source", source]).succeeds().out;
    assert!(shown.snapshot() == before, "--diff writes nothing");

    let mut git = Command::new("git");
    git.args(["apply", "-p1", "-"]).current_dir(&shown.root);
    // Without this, git would look for a repository above.
    git.env(
        "GIT_CEILING_DIRECTORIES",
        shown.root.parent().expect("has one"),
    );
    fs::remove_dir_all(shown.path(".git")).expect("removes");
    let patch = shown.source.join("patch");
    fs::write(&patch, diff).expect("writes");
    git.stdin(fs::File::open(patch).expect("opens"));
    Run::of(&mut git).succeeds();
    assert_eq!(shown.check(), 0, "the diff integrates as the command does");
    let run = shown.run(&["--diff", "--source", source]).succeeds();
    assert_eq!(run.out, "", "nothing is left to change");
    shown.run(&["--revert"]).succeeds();
    let git_index = shown.path(".git/index");
    let rest: BTreeMap<_, _> = before
        .into_iter()
        .filter(|(path, _)| *path != git_index)
        .collect();
    assert!(shown.snapshot() == rest);
}

/// The edits that have an anchor, each with a checkout that has a place for it.
fn anchored() -> impl Iterator<Item = (&'static Edit, Checkout)> {
    EDITS
        .iter()
        .filter(|edit| edit.place != Place::End)
        .map(|edit| (edit, Checkout::new(VALIDATED)))
}

#[test]
fn a_missing_anchor_is_refused_by_name_and_nothing_is_written() {
    for (edit, checkout) in anchored() {
        let text = checkout.read(edit.file);
        assert_eq!(text.matches(edit.anchor).count(), 1, "{}", edit.name);
        checkout.write(edit.file, &text.replace(edit.anchor, "\n"));
        let before = checkout.snapshot();
        if let When::FileHas(needle) = edit.when
            && !checkout.read(edit.file).contains(needle)
        {
            // Without the text that the edit is about there is no place for it.
            checkout.integrate().succeeds();
            assert_eq!(checkout.check(), 0, "{}", edit.name);
            continue;
        }
        let line = edit.anchor.trim().lines().next().expect("is not empty");
        checkout
            .integrate()
            .refused(&[edit.file, edit.name, line, "2026-07-23", "55505aaa"]);
        assert!(checkout.snapshot() == before, "{}", edit.name);
        assert_eq!(checkout.check(), 1, "{}", edit.name);
    }
}

#[test]
fn an_anchor_that_is_there_twice_is_refused_with_its_lines() {
    for (edit, checkout) in anchored() {
        let text = checkout.read(edit.file);
        let place = text.find(edit.anchor).expect("is there");
        let first = text[..place].matches('\n').count() + 1;
        checkout.write(edit.file, &format!("{text}{}", edit.anchor));
        let before = checkout.snapshot();
        checkout.integrate().refused(&[
            edit.file,
            edit.name,
            &format!("more than once, on lines {first}, "),
            "2026-07-23",
        ]);
        assert!(checkout.snapshot() == before, "{}", edit.name);
    }
}

#[test]
fn a_missing_file_is_refused_by_name_unless_it_is_optional() {
    for edit in EDITS {
        let checkout = Checkout::new(VALIDATED);
        fs::remove_file(checkout.path(edit.file)).expect("is there");
        let run = checkout.integrate();
        match edit.when {
            When::Always => run.refused(&[edit.file]),
            When::FileExists | When::FileHas(_) => {
                run.succeeds();
            }
        }
    }
}

#[test]
fn a_half_integrated_checkout_says_which_half_and_can_be_reverted() {
    let integrated = Checkout::new(VALIDATED);
    let originals = VALIDATED.files();
    let before = integrated.snapshot();
    integrated.integrate().succeeds();
    for edit in EDITS {
        let whole = integrated.read(edit.file);
        integrated.write(edit.file, &originals[edit.file]);
        let half = integrated.snapshot();

        let run = integrated.run(&["--check"]);
        assert_eq!(run.status, 3, "{}: {}", edit.file, run.out);
        let (present, missing) = run.out.split_once("not in:").expect("has two lists");
        let entry = format!("\n    {}: ", edit.name);
        assert!(missing.contains(&entry), "{}", run.out);
        assert!(!present.contains(&entry), "{}", run.out);
        integrated
            .integrate()
            .refused(&["partly", edit.name, edit.file, "--revert"]);
        assert!(integrated.snapshot() == half, "{}", edit.file);

        integrated.run(&["--revert"]).succeeds();
        assert!(integrated.snapshot() == before, "{}", edit.file);
        integrated.integrate().succeeds();
        assert_eq!(integrated.read(edit.file), whole);
    }
}

#[test]
fn half_of_a_files_edits_can_be_reverted_too() {
    let checkout = Checkout::new(VALIDATED);
    let before = checkout.snapshot();
    // The edits of which one can be taken out by hand, leaving no trace.
    let simple = EDITS
        .iter()
        .filter(|edit| edit.place != Place::Instead && !edit.text.contains('{'));
    for edit in simple {
        checkout.integrate().succeeds();
        let text = checkout.read(edit.file);
        assert_eq!(text.matches(edit.text).count(), 1, "{}", edit.name);
        checkout.write(edit.file, &text.replace(edit.text, ""));
        assert_eq!(checkout.check(), 3, "{}", edit.name);
        checkout.run(&["--revert"]).succeeds();
        assert!(checkout.snapshot() == before, "{}", edit.name);
    }
}

#[test]
fn an_edit_that_is_in_twice_is_named() {
    let checkout = Checkout::new(PINNED);
    checkout.integrate().succeeds();
    let types = checkout.read(TYPES);
    let twice =
        "        case MEMFABRIC:  // memfabric integrate\n            return \"memfabric\";\n";
    checkout.write(TYPES, &types.replace(twice, &twice.repeat(2)));
    let before = checkout.snapshot();
    let run = checkout.run(&["--check"]);
    assert_eq!(run.status, 3, "{}", run.out);
    assert!(
        run.out.contains("type-name is in more than once"),
        "{}",
        run.out
    );
    checkout
        .integrate()
        .refused(&["type-name is in more than once"]);
    checkout.run(&["--revert"]).refused(&["types.h:"]);
    assert!(checkout.snapshot() == before);
}

#[test]
fn an_edit_that_somebody_changed_is_not_taken_out() {
    let checkout = Checkout::new(PINNED);
    checkout.integrate().succeeds();
    let types = checkout.read(TYPES);
    checkout.write(
        TYPES,
        &types.replace("return \"memfabric\";", "return \"mf\";"),
    );
    let before = checkout.snapshot();
    assert_eq!(checkout.check(), 3);
    checkout
        .run(&["--revert"])
        .refused(&["types.h:", "memfabric"]);
    assert!(checkout.snapshot() == before);
}

#[test]
fn what_somebody_wrote_next_to_the_edits_stays() {
    let checkout = Checkout::new(PINNED);
    let file = "mooncake-transfer-engine/tent/tests/CMakeLists.txt";
    let own = "# my own test of MEMFABRIC\n";
    let before = checkout.read(file);
    checkout.integrate().succeeds();
    checkout.write(file, &(checkout.read(file) + own));
    assert_eq!(checkout.check(), 0);
    checkout.run(&["--revert"]).succeeds();
    assert_eq!(checkout.read(file), before + own);
}

#[test]
fn a_memfabric_of_mooncakes_own_is_refused_and_never_taken_out() {
    // The very lines that integrate writes, but for its mark.
    let spelled_alike = |checkout: &Checkout| {
        let types = checkout.read(TYPES);
        let types = types
            .replace("    // Sentinel", "    MEMFABRIC,\n    // Sentinel")
            .replace(
                "return TCP;\n",
                "return TCP;\n    if (str == \"memfabric\") return MEMFABRIC;\n",
            );
        checkout.write(TYPES, &types);
    };
    let option = |checkout: &Checkout| {
        let file = "mooncake-common/common.cmake";
        let text = checkout.read(file) + "option(USE_MEMFABRIC \"upstream's\" OFF)\n";
        checkout.write(file, &text);
    };
    let header = |checkout: &Checkout| {
        checkout.write(&format!("{TENT}/include/tent/transport/memfabric/a.h"), "");
    };
    let sources = |checkout: &Checkout| {
        checkout.write(&format!("{TENT}/src/transport/memfabric/a.cpp"), "");
    };
    type Case<'a> = (&'a dyn Fn(&Checkout), &'a str);
    let cases: [Case; 4] = [
        (&spelled_alike, "types.h:"),
        (&option, "common.cmake:9"),
        (&header, "include/tent/transport/memfabric"),
        (&sources, "src/transport/memfabric"),
    ];
    for (change, place) in cases {
        let checkout = Checkout::new(PINNED);
        change(&checkout);
        let before = checkout.snapshot();
        checkout
            .integrate()
            .refused(&["MEMFABRIC of its own", place]);
        assert_eq!(checkout.check(), 1, "{place}");
        checkout.run(&["--revert"]);
        assert!(checkout.snapshot() == before, "{place}");
    }
}

#[test]
fn sources_inside_the_checkout_are_named_relative_to_it() {
    let checkout = Checkout::new(PINNED);
    let inside = checkout.path(&format!("{TENT}/src/transport/memfabric"));
    make_source(&inside);
    let before = checkout.snapshot();
    checkout
        .run(&["--source", inside.to_str().expect("is text")])
        .succeeds();
    let text = checkout.read(TRANSPORTS);
    assert!(
        text.contains("\"${CMAKE_CURRENT_SOURCE_DIR}/memfabric\"\n"),
        "{text}"
    );
    assert_eq!(checkout.check(), 0);
    checkout.run(&["--revert"]).succeeds();
    assert!(checkout.snapshot() == before);
}

#[test]
fn the_sources_are_where_the_command_was_built_unless_told() {
    let checkout = Checkout::new(PINNED);
    checkout.run(&[]).succeeds();
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).parent();
    let built = format!("      \"{}\"\n", top.expect("the workspace").display());
    let text = checkout.read(TRANSPORTS);
    assert!(text.contains(&built), "no {built:?} in {text}");
}

#[test]
fn a_path_with_blanks_and_cmakes_own_signs_is_quoted() {
    let checkout = Checkout::new(PINNED);
    let before = checkout.snapshot();
    let source = checkout.source.join(r#"a b/$c "d" \e"#);
    make_source(&source);
    let argument = source.to_str().expect("is text");
    let run = checkout.run(&["--source", argument]).succeeds();
    let quoted = format!("{}{}", checkout.source.display(), r#"/a b/\$c \"d\" \\e"#);
    let text = checkout.read(TRANSPORTS);
    assert!(
        text.contains(&format!("      \"{quoted}\"\n      CACHE PATH")),
        "{text}"
    );
    assert!(run.out.contains(&quoted), "{}", run.out);
    let check = checkout.run(&["--check"]).succeeds();
    assert!(check.out.contains(&quoted), "{}", check.out);
    checkout.run(&["--source", argument]).succeeds();
    checkout.run(&["--revert"]).succeeds();
    assert!(checkout.snapshot() == before);
}

#[test]
fn other_sources_than_those_integrated_are_refused() {
    let checkout = Checkout::new(PINNED);
    checkout.integrate().succeeds();
    let before = checkout.snapshot();
    let other = checkout.source.join("other");
    make_source(&other);
    let argument = other.to_str().expect("is text");
    checkout
        .run(&["--source", argument])
        .refused(&[argument, "--revert"]);
    assert!(checkout.snapshot() == before);
}

#[test]
fn a_directory_that_is_not_this_transport_is_no_source() {
    let checkout = Checkout::new(PINNED);
    let before = checkout.snapshot();
    let semicolon = checkout.source.join("a;b");
    make_source(&semicolon);
    let elsewhere = checkout.source.join("elsewhere");
    fs::create_dir(&elsewhere).expect("makes a directory");
    fs::write(
        elsewhere.join("Cargo.toml"),
        "[package]\nname = \"other\"\n",
    )
    .expect("writes");
    let uncmaked = checkout.source.join("uncmaked");
    make_source(&uncmaked);
    fs::remove_file(uncmaked.join("CMakeLists.txt")).expect("removes");
    let cases = [
        (semicolon, "a;b"),
        (elsewhere, "Cargo.toml"),
        (uncmaked, "CMakeLists.txt"),
        (checkout.source.join("nowhere"), "nowhere"),
    ];
    for (source, word) in cases {
        let argument = source.to_str().expect("is text");
        checkout.run(&["--source", argument]).refused(&[word]);
    }
    assert!(checkout.snapshot() == before);
}

#[test]
fn what_is_not_mooncake_is_refused() {
    let empty = tempfile::tempdir().expect("a directory of the test's own");
    let inside = Checkout::new(PINNED);
    let cases = [
        (empty.path().to_owned(), "CMakeLists.txt"),
        (empty.path().join("nowhere"), "nowhere"),
        (inside.path("mooncake-store"), "not a Mooncake checkout"),
        (inside.path("CMakeLists.txt"), "CMakeLists.txt"),
    ];
    for (directory, word) in cases {
        for mode in ["--check", "--diff", "--revert"] {
            let mut command = Command::new(env!("CARGO_BIN_EXE_memfabric"));
            command.arg("integrate").arg(&directory).arg(mode);
            Run::of(&mut command).refused(&[word]);
        }
    }
}

#[test]
fn a_mooncake_that_is_too_old_is_told_the_oldest_that_is_not() {
    let checkout = Checkout::new(OLDEST);
    // Until 2026-07-23 the names lived elsewhere.
    let types = checkout.read(TYPES);
    let (enumerators, _) = types.split_once("inline const char*").expect("has names");
    checkout.write(TYPES, enumerators);
    let before = checkout.snapshot();
    checkout.integrate().refused(&[
        "types.h",
        "case kNumTransportTypes:",
        "2026-07-23 (commit 55505aaa)",
    ]);
    assert!(checkout.snapshot() == before);
    let run = checkout.run(&["--check"]);
    assert_eq!(run.status, 1, "{}", run.out);
    assert!(run.error.contains("2026-07-23"), "{}", run.error);
}

#[test]
fn permissions_and_links_within_the_checkout_stay() {
    let checkout = Checkout::new(PINNED);
    let types = checkout.path(TYPES);
    fs::set_permissions(&types, fs::Permissions::from_mode(0o640)).expect("sets");
    let real = checkout.path("mooncake-common/real.cmake");
    let link = checkout.path("mooncake-common/common.cmake");
    fs::rename(&link, &real).expect("renames");
    symlink("real.cmake", &link).expect("links");

    checkout.integrate().succeeds();
    let mode = fs::metadata(&types).expect("is there").permissions().mode();
    assert_eq!(mode & 0o777, 0o640);
    assert!(fs::symlink_metadata(&link).expect("is there").is_symlink());
    let text = fs::read_to_string(real).expect("reads");
    assert!(text.contains(MARK), "{text}");
}

#[test]
fn a_link_that_leaves_the_checkout_is_refused() {
    let checkout = Checkout::new(PINNED);
    let outside = checkout.source.join("types.h");
    fs::rename(checkout.path(TYPES), &outside).expect("renames");
    symlink(&outside, checkout.path(TYPES)).expect("links");
    let before = fs::read(&outside).expect("reads");
    checkout.integrate().refused(&[TYPES, "outside"]);
    assert_eq!(fs::read(&outside).expect("reads"), before);
}

#[test]
fn a_name_that_is_taken_leaves_every_file_as_it_was() {
    for role in ["new", "old"] {
        let checkout = Checkout::new(PINNED);
        let tests = checkout.path(&format!("{TENT}/tests"));
        fs::create_dir(tests.join(format!(".CMakeLists.txt.memfabric-{role}"))).expect("makes");
        let before = checkout.snapshot();
        checkout.integrate().refused(&[
            &format!(".CMakeLists.txt.memfabric-{role}"),
            "no file was changed",
        ]);
        assert!(checkout.snapshot() == before, "{role}");
    }
}

#[test]
fn a_disk_that_fills_up_leaves_every_file_as_it_was() {
    let checkout = Checkout::new(PINNED);
    // The last file to be written is the one that does not fit.
    let last = checkout.read(SELECTOR_TEST) + &"// filler\n".repeat(100_000);
    checkout.write(SELECTOR_TEST, &last);
    let before = checkout.snapshot();
    let run = |script: &str| {
        let mut command = Command::new("sh");
        command
            .args(["-c", script, env!("CARGO_BIN_EXE_memfabric"), "integrate"])
            .arg(&checkout.root)
            .arg("--source")
            .arg(&checkout.source);
        Run::of(&mut command)
    };
    // A limit on the size of a file, and a write past it is an error: what a full
    // disk looks like to the command.
    run("trap '' XFSZ; ulimit -f 256; exec \"$0\" \"$@\"")
        .refused(&["transport_selector_test.cpp", "no file was changed"]);
    assert!(checkout.snapshot() == before);
    run("trap '' XFSZ; exec \"$0\" \"$@\"").succeeds();
}

#[test]
fn a_read_only_checkout_stays_as_it_was() {
    let checkout = Checkout::new(PINNED);
    let everything = || {
        let mut found = vec![checkout.root.clone()];
        let mut next = 0;
        while let Some(path) = found.get(next).cloned() {
            next += 1;
            if path.is_dir() {
                let entries = fs::read_dir(path).expect("lists");
                found.extend(entries.map(|entry| entry.expect("lists").path()));
            }
        }
        found
    };
    let set_mode = |directory: u32, file: u32| {
        for path in everything() {
            let mode = if path.is_dir() { directory } else { file };
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("sets");
        }
    };
    let before = checkout.snapshot();
    set_mode(0o555, 0o444);
    // Permissions do not bind root, so root runs the command as nobody, from a
    // place that nobody can reach.
    let place = checkout.root.parent().expect("has one");
    fs::set_permissions(place, fs::Permissions::from_mode(0o755)).expect("sets");
    let reachable = place.join("memfabric");
    // By another process: were this one to write the file, a process started
    // meanwhile by another test could hold it open, and it could not be run.
    let mut copy = Command::new("cp");
    Run::of(copy.arg(env!("CARGO_BIN_EXE_memfabric")).arg(&reachable)).succeeds();
    let mut command = Command::new(&reachable);
    command
        .arg("integrate")
        .arg(&checkout.root)
        .arg("--source")
        .arg(&checkout.source);
    if fs::metadata(place).expect("is there").uid() == 0 {
        command.uid(65534).gid(65534);
    }
    let run = Run::of(&mut command);
    set_mode(0o755, 0o644);
    run.refused(&["cannot write", "Permission denied", "no file was changed"]);
    assert!(checkout.snapshot() == before);
    Run::of(&mut checkout.command(&["--check"]));
    checkout.integrate().succeeds();
}

#[test]
fn only_one_mode_at_a_time() {
    let checkout = Checkout::new(PINNED);
    for pair in [
        ["--check", "--diff"],
        ["--check", "--revert"],
        ["--diff", "--revert"],
    ] {
        checkout.run(&pair).refused(&["cannot be used with"]);
    }
}

/// What can become of a file.
#[derive(Clone, Debug)]
enum Damage {
    Flip(Index, u8),
    Cut(Index),
    Empty,
    Remove,
    /// Lines move, come twice or go.
    Repeat(Index),
    Swap(Index, Index),
    Drop(Index),
    /// Ends and encodings.
    CarriageReturns,
    Insert(Index, Vec<u8>),
    Huge(Index),
    /// An anchor of this or another file, or a mark of an edit, in a wrong place.
    Edit(Index, Index),
    Mark(Index, Index),
}

impl Damage {
    fn any() -> impl Strategy<Value = Self> {
        let at = any::<Index>;
        prop_oneof![
            2 => (at(), any::<u8>()).prop_map(|(at, byte)| Self::Flip(at, byte)),
            2 => at().prop_map(Self::Cut),
            1 => Just(Self::Empty),
            1 => Just(Self::Remove),
            3 => at().prop_map(Self::Repeat),
            2 => (at(), at()).prop_map(|(one, other)| Self::Swap(one, other)),
            3 => at().prop_map(Self::Drop),
            2 => Just(Self::CarriageReturns),
            2 => (at(), prop::collection::vec(any::<u8>(), 1..9))
                .prop_map(|(at, bytes)| Self::Insert(at, bytes)),
            1 => at().prop_map(Self::Huge),
            3 => (at(), at()).prop_map(|(at, edit)| Self::Edit(at, edit)),
            3 => (at(), at()).prop_map(|(at, edit)| Self::Mark(at, edit)),
        ]
    }

    /// The file's bytes with this done to them; None if it goes.
    fn of(&self, text: Vec<u8>) -> Option<Vec<u8>> {
        let mut lines: Vec<Vec<u8>> = text
            .split_inclusive(|byte| *byte == b'\n')
            .map(<[u8]>::to_vec)
            .collect();
        let mut text = text;
        let line = |at: &Index| at.index(lines.len().max(1));
        match self {
            Self::Flip(at, byte) if !text.is_empty() => {
                let at = at.index(text.len());
                text[at] ^= byte;
                return Some(text);
            }
            Self::Cut(at) => {
                text.truncate(at.index(text.len() + 1));
                return Some(text);
            }
            Self::Empty => return Some(Vec::new()),
            Self::Remove => return None,
            Self::CarriageReturns => {
                let text = String::from_utf8_lossy(&text).replace('\n', "\r\n");
                return Some(text.into_bytes());
            }
            _ if lines.is_empty() => return Some(text),
            Self::Repeat(at) => lines.insert(line(at), lines[line(at)].clone()),
            Self::Swap(one, other) => {
                let (one, other) = (line(one), line(other));
                lines.swap(one, other);
            }
            Self::Drop(at) => {
                lines.remove(line(at));
            }
            Self::Insert(at, bytes) => lines.insert(line(at), bytes.clone()),
            Self::Huge(at) => lines.insert(line(at), vec![b'x'; 1 << 20]),
            Self::Edit(at, edit) => {
                let edit = EDITS[edit.index(EDITS.len())].text;
                lines.insert(line(at), edit.as_bytes().to_vec());
            }
            Self::Mark(at, edit) => {
                let edit = EDITS[edit.index(EDITS.len())].name;
                lines.insert(line(at), format!("{MARK}: {edit}\n").into_bytes());
            }
            Self::Flip(..) => {}
        }
        Some(lines.concat())
    }
}

/// Does each damage to a file that edits go into.
fn damage(checkout: &Checkout, damages: &[(Index, Damage)]) {
    for (file, damage) in damages {
        let path = checkout.path(EDITS[file.index(EDITS.len())].file);
        let Ok(text) = fs::read(&path) else { continue };
        match damage.of(text) {
            Some(text) => fs::write(path, text).expect("writes"),
            None => fs::remove_file(path).expect("removes"),
        }
    }
}

fn damages() -> impl Strategy<Value = Vec<(Index, Damage)>> {
    prop::collection::vec((any::<Index>(), Damage::any()), 1..4)
}

/// The same checkouts in each run, unless more are asked for.
fn inputs() -> ProptestConfig {
    let mut config = ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    if std::env::var_os("PROPTEST_CASES").is_none() {
        config.cases = 150;
        config.rng_seed = RngSeed::Fixed(4);
    }
    config
}

/// Runs the command, which does it or refuses in words; a refusal leaves every
/// file as it was. Whether it was done.
fn done_or_refused(checkout: &Checkout, arguments: &[&str]) -> Result<bool, TestCaseError> {
    let before = checkout.snapshot();
    let run = checkout.run(arguments);
    let text = format!("{}{}", run.out, run.error);
    prop_assert!([0, 2].contains(&run.status), "{}: {}", run.status, text);
    if run.status == 2 {
        prop_assert!(run.error.starts_with("memfabric integrate: "), "{}", text);
        prop_assert!(checkout.snapshot() == before, "changed by: {}", text);
    }
    Ok(run.status == 0)
}

proptest! {
    #![proptest_config(inputs())]

    #[test]
    fn a_damaged_checkout_is_integrated_whole_or_not_at_all(
        generation in prop::sample::select(&GENERATIONS[..]),
        damages in damages(),
    ) {
        let checkout = Checkout::new(generation);
        damage(&checkout, &damages);
        let before = checkout.snapshot();
        let source = checkout.source.to_str().expect("is text");
        if done_or_refused(&checkout, &["--source", source])? {
            prop_assert_eq!(checkout.check(), 0);
            let integrated = checkout.snapshot();
            prop_assert!(done_or_refused(&checkout, &["--source", source])?);
            prop_assert!(checkout.snapshot() == integrated, "a second run changed it");
            prop_assert!(done_or_refused(&checkout, &["--revert"])?);
            prop_assert!(checkout.snapshot() == before, "not reverted to the byte");
        }
    }

    #[test]
    fn damaged_edits_are_taken_out_or_refused(
        generation in prop::sample::select(&GENERATIONS[..]),
        damages in damages(),
    ) {
        let checkout = Checkout::new(generation);
        checkout.integrate().succeeds();
        damage(&checkout, &damages);
        let before = checkout.snapshot();
        let run = checkout.run(&["--check"]);
        prop_assert!((0..=3).contains(&run.status), "{}{}", run.out, run.error);
        prop_assert!(checkout.snapshot() == before, "--check writes nothing");
        let source = checkout.source.to_str().expect("is text");
        done_or_refused(&checkout, &["--source", source])?;
        if done_or_refused(&checkout, &["--revert"])? {
            let reverted = checkout.snapshot();
            done_or_refused(&checkout, &["--revert"])?;
            prop_assert!(checkout.snapshot() == reverted, "reverted twice");
        }
    }
}
