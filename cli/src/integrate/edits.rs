// SPDX-License-Identifier: Apache-2.0
//! What a Mooncake checkout needs, as data: one entry per edit.
//!
//! Adding an edit is adding an entry to [`EDITS`]. Text and anchors are written
//! with `\n`; a file's own line endings are kept. Two words in a text are filled
//! in: `{source}`, where this transport's sources are, in CMake's spelling, and
//! `{value}`, the integer of `TransportType::MEMFABRIC` in that checkout.

/// Every text carries this, so that no line of Mooncake's own, not even one
/// that says the same, is ever taken for an edit.
pub const MARK: &str = "memfabric integrate";

/// The oldest Mooncake whose files have all the anchors.
pub const OLDEST: &str = "main of 2026-07-23 (commit 55505aaa)";

/// The file whose `enum TransportType` gives the integer its value.
pub const TYPES: &str = "mooncake-transfer-engine/tent/include/tent/common/types.h";

/// Where the transport may live inside a checkout.
pub const INSIDE: &str = "mooncake-transfer-engine/tent/src/transport/memfabric";

/// How [`INSIDE`] is written in the CMake file that adds it.
pub const INSIDE_IN_CMAKE: &str = "${CMAKE_CURRENT_SOURCE_DIR}/memfabric";

/// One edit of one file.
pub struct Edit {
    /// A short name for messages.
    pub name: &'static str,
    /// The file, relative to the checkout.
    pub file: &'static str,
    /// Whether the checkout has a place for it.
    pub when: When,
    /// What the file has exactly once; empty for [`Place::End`].
    pub anchor: &'static str,
    /// Where the text goes, seen from the anchor.
    pub place: Place,
    /// What is put there.
    pub text: &'static str,
    /// Why Mooncake needs it.
    pub reason: &'static str,
}

/// Whether an edit applies to a checkout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// To every supported one.
    Always,
    /// To those that have the file.
    FileExists,
    /// To those that have the file, with this text in it.
    FileHas(&'static str),
}

/// Where a text goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In front of the anchor.
    Before,
    /// Behind the anchor.
    After,
    /// In the anchor's place. The anchor is part of one line, so that taking
    /// the edit out restores it to the byte.
    Instead,
    /// At the end of the file.
    End,
}

const COMMON_CMAKE: &str = "mooncake-common/common.cmake";
const LOADER: &str = "mooncake-transfer-engine/tent/src/runtime/transport_loader.cpp";
const ENGINE: &str = "mooncake-transfer-engine/tent/src/runtime/transfer_engine_impl.cpp";
const PLATFORM: &str = "mooncake-transfer-engine/tent/src/runtime/platform.cpp";
const TRANSPORT_CMAKE: &str = "mooncake-transfer-engine/tent/src/transport/CMakeLists.txt";
const TENT_CMAKE: &str = "mooncake-transfer-engine/tent/src/CMakeLists.txt";
const TESTS_CMAKE: &str = "mooncake-transfer-engine/tent/tests/CMakeLists.txt";
const SELECTOR_TEST: &str = "mooncake-transfer-engine/tent/tests/transport_selector_test.cpp";
const C_API: &str = "mooncake-transfer-engine/tent/include/tent/transfer_engine.h";
const PYBIND: &str = "mooncake-transfer-engine/tent/src/python/pybind.cpp";
const VALIDATION: &str = "mooncake-transfer-engine/tent/src/common/config_validation.cpp";
const TEBENCH: &str = "mooncake-transfer-engine/benchmark/tent_backend.cpp";
const TEBENCH_HELP: &str = "mooncake-transfer-engine/benchmark/utils.cpp";
const STORE_CLIENT: &str = "mooncake-store/src/real_client.cpp";
const STORE_UTILS: &str = "mooncake-store/include/utils.h";
const STORE_NUMA: &str = "mooncake-store/src/utils.cpp";

/// All edits, file by file.
pub const EDITS: &[Edit] = &[
    Edit {
        name: "option",
        file: COMMON_CMAKE,
        when: When::Always,
        anchor: "option(USE_TENT \"option for building Mooncake TENT\" OFF)\n",
        place: Place::After,
        text: r#"# Added by "memfabric integrate".
option(USE_MEMFABRIC "option for using MemFabric transport in TENT" OFF)
if(USE_MEMFABRIC)
  if(NOT USE_TENT)
    message(
      FATAL_ERROR
        "USE_MEMFABRIC=ON requires USE_TENT=ON: the MemFabric transport is part of TENT. Re-run cmake with -DUSE_TENT=ON."
    )
  endif()
  if(USE_ASCEND OR USE_ASCEND_DIRECT)
    message(
      WARNING
        "USE_MEMFABRIC is on together with USE_ASCEND or USE_ASCEND_DIRECT. Enable either Ascend / Ascend Direct or MemFabric, not both."
    )
  endif()
  add_compile_definitions(USE_MEMFABRIC)
  message(STATUS "MemFabric transport is enabled")
  # Nothing here needs CANN to build: its paths are added where it is installed.
  if(DEFINED ENV{ASCEND_HOME_PATH})
    set(MEMFABRIC_CANN_ROOT "$ENV{ASCEND_HOME_PATH}")
  else()
    set(MEMFABRIC_CANN_ROOT "/usr/local/Ascend/ascend-toolkit/latest")
  endif()
  set(MEMFABRIC_ACL_ROOT "")
  foreach(dir "${MEMFABRIC_CANN_ROOT}/${CMAKE_SYSTEM_PROCESSOR}-linux"
              "${MEMFABRIC_CANN_ROOT}")
    if(NOT MEMFABRIC_ACL_ROOT AND EXISTS "${dir}/include/acl/acl.h")
      set(MEMFABRIC_ACL_ROOT "${dir}")
    endif()
  endforeach()
  if(MEMFABRIC_ACL_ROOT)
    include_directories(SYSTEM "${MEMFABRIC_ACL_ROOT}/include")
    link_directories("${MEMFABRIC_ACL_ROOT}/lib64")
    message(STATUS "  ACL: ${MEMFABRIC_ACL_ROOT}")
  else()
    message(
      STATUS "  ACL: none in ${MEMFABRIC_CANN_ROOT}; not needed to build")
  endif()
endif()

"#,
        reason: "the build option, and ACL's paths without the Ascend options",
    },
    Edit {
        name: "enumerator",
        file: TYPES,
        when: When::Always,
        anchor: "    // Sentinel: must remain the last enumerator.\n",
        place: Place::Before,
        text: "    // Added by \"memfabric integrate\", last so that no other value moves.\n    MEMFABRIC,\n",
        reason: "the transport's type; its integer travels between nodes",
    },
    Edit {
        name: "type-name",
        file: TYPES,
        when: When::Always,
        anchor: "        case kNumTransportTypes:\n",
        place: Place::Before,
        text: "        case MEMFABRIC:  // memfabric integrate\n            return \"memfabric\";\n",
        reason: "its name in policies, logs and metrics",
    },
    Edit {
        name: "type-parse",
        file: TYPES,
        when: When::Always,
        anchor: "    if (str == \"tcp\") return TCP;\n",
        place: Place::After,
        text: "    if (str == \"memfabric\") return MEMFABRIC;  // memfabric integrate\n",
        reason: "policies and hints name it",
    },
    Edit {
        name: "loader-include",
        file: LOADER,
        when: When::Always,
        anchor: "\nnamespace mooncake {\n",
        place: Place::Before,
        text: "\n#ifdef USE_MEMFABRIC  // memfabric integrate\n#include \"tent/transport/memfabric/memfabric_transport.h\"\n#endif\n",
        reason: "the loader constructs it",
    },
    Edit {
        name: "loader",
        file: LOADER,
        when: When::Always,
        anchor: "\n    return Status::OK();\n}\n",
        place: Place::Before,
        text: "\n#ifdef USE_MEMFABRIC  // memfabric integrate\n    if (conf_->get(\"transports/memfabric/enable\", false))\n        transport_list_[MEMFABRIC] = std::make_shared<MemFabricTransport>();\n#endif\n",
        reason: "transports/memfabric/enable, off unless asked for",
    },
    Edit {
        name: "order",
        file: ENGINE,
        when: When::Always,
        anchor: "    if (transport_list_[RDMA]) result.push_back(RDMA);\n",
        place: Place::Before,
        text: "    // memfabric integrate\n    if (transport_list_[MEMFABRIC]) result.push_back(MEMFABRIC);\n",
        reason: "without a policy this order is the preference: enabled must mean used",
    },
    Edit {
        name: "platform-include",
        file: PLATFORM,
        when: When::Always,
        anchor: "#else\n#include \"tent/platform/cpu.h\"\n",
        place: Place::Before,
        text: "#elif defined(USE_MEMFABRIC)  // memfabric integrate\n#include \"tent/platform/npu.h\"\n",
        reason: "the platform below",
    },
    Edit {
        name: "platform",
        file: PLATFORM,
        when: When::Always,
        anchor: "#else\n        g_instance = std::make_shared<CpuPlatform>(conf);\n",
        place: Place::Before,
        text: "#elif defined(USE_MEMFABRIC)  // memfabric integrate\n        g_instance = std::make_shared<NpuPlatform>(conf);\n",
        reason: "the CPU platform takes NPU memory for DRAM and touches it",
    },
    Edit {
        name: "sources",
        file: TRANSPORT_CMAKE,
        when: When::Always,
        anchor: "add_library(tent_transport_all INTERFACE)\n",
        place: Place::Before,
        text: r#"# Added by "memfabric integrate".
if(USE_MEMFABRIC)
  set(MEMFABRIC_TRANSPORT_DIR
      "{source}"
      CACHE PATH "Sources of the MemFabric transport")
  add_subdirectory("${MEMFABRIC_TRANSPORT_DIR}"
                   "${CMAKE_CURRENT_BINARY_DIR}/memfabric")
endif()

"#,
        reason: "the target tent_xport_memfabric",
    },
    Edit {
        name: "transports",
        file: TRANSPORT_CMAKE,
        when: When::Always,
        anchor: "  tent_xport_ascend_direct\n",
        place: Place::Before,
        text: "  tent_xport_memfabric # memfabric integrate\n",
        reason: "the runtime links it and sees its headers",
    },
    Edit {
        name: "link-group",
        file: TENT_CMAKE,
        when: When::Always,
        anchor: "  tent_xport_ascend_direct\n",
        place: Place::Before,
        text: "  tent_xport_memfabric # memfabric integrate\n",
        reason: "static archives that need each other are one link group",
    },
    Edit {
        name: "test-target",
        file: TESTS_CMAKE,
        when: When::Always,
        anchor: "",
        place: Place::End,
        text: r#"
# Added by "memfabric integrate".
if(USE_MEMFABRIC)
  add_subdirectory("${MEMFABRIC_TRANSPORT_DIR}/tests/cpp"
                   "${CMAKE_CURRENT_BINARY_DIR}/memfabric")
endif()
"#,
        reason: "tent_memfabric_transport_test among TENT's tests",
    },
    Edit {
        name: "type-count",
        file: SELECTOR_TEST,
        when: When::FileHas("static_cast<int>(kNumTransportTypes)"),
        anchor: "    EXPECT_EQ(static_cast<int>(kNumTransportTypes), ",
        place: Place::After,
        text: "1 /* memfabric integrate */ + ",
        reason: "Mooncake's own test pins the number of transport types",
    },
    Edit {
        name: "c-type",
        file: C_API,
        when: When::Always,
        anchor: "\n\nstruct tent_memory_options {\n",
        place: Place::Before,
        text: "\n#define TRANSPORT_MEMFABRIC ({value}) /* memfabric integrate */",
        reason: "C callers name the type by its integer",
    },
    Edit {
        name: "python-type",
        file: PYBIND,
        when: When::Always,
        anchor: "        .value(\"AscendDirect\", TransportType::AscendDirect)\n",
        place: Place::After,
        text: "        // memfabric integrate\n        .value(\"MEMFABRIC\", TransportType::MEMFABRIC)\n",
        reason: "Python callers name the type",
    },
    Edit {
        name: "known-transports",
        file: VALIDATION,
        when: When::FileExists,
        anchor: "constexpr std::string_view kTransports[] = {\n",
        place: Place::After,
        text: "    \"memfabric\",  // memfabric integrate\n",
        reason: "its configuration is validated like the others'",
    },
    Edit {
        name: "compiled-transports",
        file: VALIDATION,
        when: When::FileExists,
        anchor: "\n    return context;\n",
        place: Place::Before,
        text: "\n#ifdef USE_MEMFABRIC  // memfabric integrate\n    context.compiled_transports.push_back(\"memfabric\");\n#endif",
        reason: "enabling what is not compiled in is rejected",
    },
    Edit {
        name: "tebench-switch",
        file: TEBENCH,
        when: When::Always,
        anchor: "            {\"tcp\", \"tcp\"},\n",
        place: Place::After,
        text: "            {\"memfabric\", \"memfabric\"},  // memfabric integrate\n",
        reason: "tebench --xport_type=memfabric enables it",
    },
    Edit {
        name: "tebench-type",
        file: TEBENCH,
        when: When::Always,
        anchor: "    if (xport_type == \"tcp\") return TCP;\n",
        place: Place::After,
        text: "    // memfabric integrate\n    if (xport_type == \"memfabric\") return MEMFABRIC;\n",
        reason: "tebench --xport_type=memfabric allocates and registers for it",
    },
    Edit {
        name: "tebench-help",
        file: TEBENCH_HELP,
        when: When::FileHas("\"Transport type: rdma|shm|"),
        anchor: "\"Transport type: rdma|shm|",
        place: Place::Instead,
        text: "\"Transport type: memfabric|\"  // memfabric integrate\n              \"rdma|shm|",
        reason: "tebench --help lists it",
    },
    Edit {
        name: "tebench-hint-help",
        file: TEBENCH_HELP,
        when: When::FileHas("    \"unspec|rdma|tcp|shm|"),
        anchor: "    \"unspec|rdma|tcp|shm|",
        place: Place::Before,
        text: "    \"memfabric|\"  // memfabric integrate\n",
        reason: "tebench --help lists it as a hint",
    },
    Edit {
        name: "hugepage-release",
        file: STORE_CLIENT,
        when: When::Always,
        anchor: "            if (this->protocol == \"ascend\" || this->protocol == \"ubshmem\") {",
        place: Place::Instead,
        text: "            // memfabric integrate: hugepages are mapped, whatever the protocol.
            if ((this->protocol == \"ascend\" || this->protocol == \"ubshmem\") &&
                !should_use_hugepage) {",
        reason: "protocol=ascend with hugepages ends in free() of a mapping",
    },
    Edit {
        name: "hugepage-512MB",
        file: STORE_UTILS,
        when: When::Always,
        anchor: "constexpr size_t SZ_1GB = 1024 * 1024 * 1024;\n",
        place: Place::Before,
        text: "constexpr size_t SZ_512MB = 512 * 1024 * 1024;  // memfabric integrate\n",
        reason: "the hugepage of aarch64 with 64 KiB base pages",
    },
    Edit {
        name: "hugepage-accept",
        file: STORE_UTILS,
        when: When::Always,
        anchor: "        if (parsed_size == SZ_2MB || parsed_size == SZ_1GB) {",
        place: Place::Instead,
        text: "        if (parsed_size == SZ_2MB || parsed_size == SZ_1GB ||
            parsed_size == SZ_512MB) {  // memfabric integrate",
        reason: "MC_STORE_HUGEPAGE_SIZE=512MB",
    },
    Edit {
        name: "hugepage-warning",
        file: STORE_UTILS,
        when: When::Always,
        anchor: "\"'. Supported: 2MB, 1GB. Fallback to 2MB.\"",
        place: Place::Instead,
        text: "\"'. Supported: 2MB, 512MB, 1GB. \"  // memfabric integrate
                            \"Fallback to 2MB.\"",
        reason: "the warning lists what is accepted",
    },
    Edit {
        name: "hugepage-flags",
        file: STORE_UTILS,
        when: When::Always,
        anchor: "        } else if (size == SZ_1GB) {\n",
        place: Place::Before,
        text: "        } else if (size == SZ_512MB) {  // memfabric integrate
            *out_flags |= use_memfd ? MFD_HUGE_512MB : MAP_HUGE_512MB;
",
        reason: "both ways of mapping get that page size",
    },
    Edit {
        name: "hugepage-log",
        file: STORE_UTILS,
        when: When::Always,
        anchor: "(size == SZ_2MB ? \"2MB\" : \"1GB\")",
        place: Place::Instead,
        text: "(size == SZ_2MB     ? \"2MB\"
                      : size == SZ_512MB ? \"512MB\"  // memfabric integrate
                                         : \"1GB\")",
        reason: "the log tells the size in use",
    },
    Edit {
        name: "hugepage-numa",
        file: STORE_NUMA,
        when: When::Always,
        anchor: "    } else if (page_size == SZ_1GB) {\n",
        place: Place::Before,
        text: "    } else if (page_size == SZ_512MB) {  // memfabric integrate
        flags |= MAP_HUGETLB | MAP_HUGE_512MB;
",
        reason: "an accepted size is the size that is mapped, on NUMA nodes too",
    },
];
