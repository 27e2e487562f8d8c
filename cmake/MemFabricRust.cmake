# SPDX-License-Identifier: Apache-2.0
# The Rust core as ordinary CMake targets.
#
# memfabric_add_core() memfabric_core: the static library, with the system
# libraries it needs and the directories of its C++ headers.
#
# memfabric_add_emulator() memfabric_emulator, memfabric_emulator_ascendcl: the
# emulated libmf_smem.so and libascendcl.so, for tests.
#
# cargo writes only into the build tree. It runs in every build and decides
# itself what is stale; what it did not write anew, nothing is rebuilt for.
#
# Settings: MEMFABRIC_CARGO, the cargo to use; CARGO_BUILD_TARGET (variable, or
# environment at the first configuration), the Rust target triple, where the one
# that follows from a toolchain file is not right; MEMFABRIC_SANITIZE=thread, the
# core, the emulator and Rust's standard library compiled for the race detector,
# with the toolchain MEMFABRIC_NIGHTLY.

include_guard(GLOBAL)

# In the cache, because the functions are also called from a surrounding
# project's directories.
get_filename_component(root "${CMAKE_CURRENT_LIST_DIR}/.." ABSOLUTE)
set(MEMFABRIC_ROOT
    "${root}"
    CACHE INTERNAL "Where the MemFabric transport's sources are")
unset(root)

set(CARGO_BUILD_TARGET
    "$ENV{CARGO_BUILD_TARGET}"
    CACHE STRING
          "Rust target triple of the MemFabric core; empty: the host's, or what the C compiler compiles for"
)

# Finds cargo and rustc and stops the configuration if they cannot build this.
function(_memfabric_find_rust)
  file(STRINGS "${MEMFABRIC_ROOT}/Cargo.toml" line REGEX "^rust-version *=")
  string(REGEX MATCH "[0-9]+(\\.[0-9]+)+" needed "${line}")
  set(advice
      "Install Rust ${needed} or later (https://rustup.rs, then 'rustup toolchain install stable'), put cargo and rustc into PATH and configure again, or name cargo with -DMEMFABRIC_CARGO=<path>."
  )

  find_program(
    MEMFABRIC_CARGO cargo
    HINTS "$ENV{CARGO_HOME}/bin" "$ENV{HOME}/.cargo/bin"
    DOC "cargo, which builds the MemFabric core" NO_CMAKE_FIND_ROOT_PATH)
  if(NOT MEMFABRIC_CARGO)
    message(
      FATAL_ERROR
        "The MemFabric transport's core is written in Rust, and no cargo was found. ${advice}"
    )
  endif()
  get_filename_component(cargo_dir "${MEMFABRIC_CARGO}" DIRECTORY)
  find_program(
    MEMFABRIC_RUSTC rustc
    HINTS ENV RUSTC "${cargo_dir}"
    DOC "rustc, which cargo runs" NO_CMAKE_FIND_ROOT_PATH)

  # In the source directory, where rustup may have an override.
  foreach(tool cargo rustc)
    string(TOUPPER "MEMFABRIC_${tool}" variable)
    execute_process(
      COMMAND "${${variable}}" --version
      WORKING_DIRECTORY "${MEMFABRIC_ROOT}"
      OUTPUT_VARIABLE output
      ERROR_VARIABLE error
      RESULT_VARIABLE result)
    if(NOT result EQUAL 0 OR NOT output MATCHES "([0-9]+\\.[0-9]+\\.[0-9]+)")
      message(
        FATAL_ERROR
          "'${${variable}} --version' failed (${result}): ${output}${error}\n${advice}"
      )
    endif()
    if(CMAKE_MATCH_1 VERSION_LESS needed)
      message(
        FATAL_ERROR
          "${${variable}} is ${tool} ${CMAKE_MATCH_1}, but the MemFabric transport needs Rust ${needed} (rust-version in ${MEMFABRIC_ROOT}/Cargo.toml). ${advice}"
      )
    endif()
  endforeach()

  if(MEMFABRIC_SANITIZE STREQUAL "thread")
    _memfabric_find_race_detector()
  endif()

  if(CMAKE_CROSSCOMPILING AND NOT CARGO_BUILD_TARGET)
    _memfabric_find_target()
  endif()
endfunction()

# Sets CARGO_BUILD_TARGET to Rust's name of what the C compiler compiles for, or
# stops the configuration.
function(_memfabric_find_target)
  # clang compiles for any machine, and is told which one.
  set(triple "${CMAKE_C_COMPILER_TARGET}")
  if(NOT triple)
    execute_process(
      COMMAND "${CMAKE_C_COMPILER}" -dumpmachine
      OUTPUT_VARIABLE triple
      OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
  if(NOT triple MATCHES "-linux-")
    set(triple "${CMAKE_SYSTEM_PROCESSOR}-linux-gnu")
  endif()
  # The vendor in the middle is anything; Rust's is "unknown".
  string(REGEX REPLACE "^([^-]+)(-.+)?-linux-(.+)$" "\\1-unknown-linux-\\3"
                       target "${triple}")
  string(REGEX REPLACE "^(arm64|ARM64)-" "aarch64-" target "${target}")
  execute_process(
    COMMAND "${MEMFABRIC_RUSTC}" --print target-list
    WORKING_DIRECTORY "${MEMFABRIC_ROOT}"
    OUTPUT_VARIABLE known)
  string(REPLACE "\n" ";" known "${known}")
  if(NOT target IN_LIST known)
    message(
      FATAL_ERROR
        "Cross-compiling for ${triple}, for which Rust has another name than ${target}: set -DCARGO_BUILD_TARGET to the one in 'rustc --print target-list', and install its standard library ('rustup target add <triple>')."
    )
  endif()
  message(STATUS "The MemFabric core is compiled for ${target}")
  set(CARGO_BUILD_TARGET
      "${target}"
      CACHE STRING "Rust target triple of the MemFabric core" FORCE)
endfunction()

# Sets what a build for the race detector needs, or stops the configuration:
# MEMFABRIC_TSAN_RUNTIME, and the triple, without which cargo would compile its
# build scripts for the detector as well.
#
# There is one runtime in a process, Rust's, and it must see every lock. So the
# standard library, whose locks are not pthread's, is compiled anew, and the
# runtime goes into the program, where libraries that are loaded later find it.
function(_memfabric_find_race_detector)
  set(MEMFABRIC_NIGHTLY
      "nightly"
      CACHE STRING "Rust toolchain for MEMFABRIC_SANITIZE=thread")
  set(toolchain ${CMAKE_COMMAND} -E env "RUSTUP_TOOLCHAIN=${MEMFABRIC_NIGHTLY}"
                "${MEMFABRIC_RUSTC}")
  set(advice
      "MEMFABRIC_SANITIZE=thread compiles Rust's standard library anew: run 'rustup toolchain install nightly --component rust-src', or name such a toolchain with -DMEMFABRIC_NIGHTLY=<name>."
  )
  execute_process(
    COMMAND ${toolchain} --version --verbose
    OUTPUT_VARIABLE version
    ERROR_VARIABLE error
    RESULT_VARIABLE result)
  if(NOT result EQUAL 0 OR NOT version MATCHES "-(nightly|dev)")
    message(
      FATAL_ERROR
        "Toolchain ${MEMFABRIC_NIGHTLY} is no nightly Rust (${result}): ${version}${error}\n${advice}"
    )
  endif()
  string(REGEX MATCH "host: ([^\n]+)" ignored "${version}")
  set(host "${CMAKE_MATCH_1}")
  if(NOT CARGO_BUILD_TARGET)
    set(CARGO_BUILD_TARGET "${host}")
  endif()
  execute_process(
    COMMAND ${toolchain} --print sysroot
    OUTPUT_VARIABLE sysroot
    OUTPUT_STRIP_TRAILING_WHITESPACE)
  set(rustlib "${sysroot}/lib/rustlib")
  if(NOT EXISTS "${rustlib}/src/rust/library/Cargo.lock")
    message(FATAL_ERROR "There is no rust-src in ${sysroot}. ${advice}")
  endif()
  file(GLOB runtime "${rustlib}/${CARGO_BUILD_TARGET}/lib/librustc*_rt.tsan.a")
  if(NOT EXISTS "${runtime}")
    message(
      FATAL_ERROR
        "${rustlib}/${CARGO_BUILD_TARGET}/lib has no librustc-nightly_rt.tsan.a: Rust has no race detector for ${CARGO_BUILD_TARGET}, or its standard library is not installed ('rustup target add --toolchain ${MEMFABRIC_NIGHTLY} ${CARGO_BUILD_TARGET}')."
    )
  endif()
  set(MEMFABRIC_TSAN_RUNTIME
      "${runtime}"
      CACHE INTERNAL "The race detector's runtime")
  set(CARGO_BUILD_TARGET
      "${CARGO_BUILD_TARGET}"
      CACHE STRING "Rust target triple of the MemFabric core" FORCE)
endfunction()

# Where cargo writes: result_target, its target directory, and result_artifacts,
# the folder of the libraries in it. In a multi-configuration build every
# configuration has its own, because two rules must not make one file. With the
# name of a configuration as third argument these are plain paths.
function(_memfabric_directories result_target result_artifacts)
  set(target_dir "${CMAKE_BINARY_DIR}/memfabric-cargo")
  get_property(multi GLOBAL PROPERTY GENERATOR_IS_MULTI_CONFIG)
  if(multi AND ARGC GREATER 2)
    string(APPEND target_dir "/${ARGV2}")
  elseif(multi)
    string(APPEND target_dir "/$<CONFIG>")
  endif()
  set(profile_dir "$<IF:$<CONFIG:Debug>,debug,release>")
  if(ARGC GREATER 2)
    string(TOUPPER "${ARGV2}" config)
    if(config STREQUAL "DEBUG")
      set(profile_dir debug)
    else()
      set(profile_dir release)
    endif()
  endif()
  set(artifacts "${target_dir}")
  if(CARGO_BUILD_TARGET)
    string(APPEND artifacts "/${CARGO_BUILD_TARGET}")
  endif()
  set(${result_target}
      "${target_dir}"
      PARENT_SCOPE)
  set(${result_artifacts}
      "${artifacts}/${profile_dir}"
      PARENT_SCOPE)
endfunction()

# The configurations of this build.
function(_memfabric_configs result)
  get_property(multi GLOBAL PROPERTY GENERATOR_IS_MULTI_CONFIG)
  if(multi)
    set(configs ${CMAKE_CONFIGURATION_TYPES})
  elseif(CMAKE_BUILD_TYPE)
    set(configs ${CMAKE_BUILD_TYPE})
  else()
    set(configs NONE)
  endif()
  set(${result}
      "${configs}"
      PARENT_SCOPE)
endfunction()

# Adds the target `name`, which runs `cargo build` with the further arguments,
# and says that this makes `files`, and `headers` of the bridge.
function(_memfabric_cargo_build name files headers)
  _memfabric_directories(target_dir artifacts)
  # The target directory is given by the variable, because the bridge's
  # generator, which cargo runs, believes it more than the option.
  set(environment "CARGO_TARGET_DIR=${target_dir}")
  # The C++ side of the bridge is compiled by cargo, with this build's compiler.
  set(target_option "")
  if(CARGO_BUILD_TARGET)
    set(target_option --target "${CARGO_BUILD_TARGET}")
    string(REPLACE "-" "_" triple "${CARGO_BUILD_TARGET}")
    string(TOUPPER "${triple}" triple_upper)
    list(APPEND environment "CC_${triple}=${CMAKE_C_COMPILER}"
         "CXX_${triple}=${CMAKE_CXX_COMPILER}" "AR_${triple}=${CMAKE_AR}"
         "CARGO_TARGET_${triple_upper}_LINKER=${CMAKE_C_COMPILER}")
  else()
    list(APPEND environment "CC=${CMAKE_C_COMPILER}"
         "CXX=${CMAKE_CXX_COMPILER}")
  endif()
  set(detector "")
  if(MEMFABRIC_SANITIZE STREQUAL "thread")
    set(detector -Zbuild-std=std,panic_unwind)
    list(
      APPEND
      environment
      "RUSTUP_TOOLCHAIN=${MEMFABRIC_NIGHTLY}"
      "RUSTFLAGS=-Zsanitizer=thread"
      "CXXFLAGS_${triple}=-fsanitize=thread -fno-omit-frame-pointer")
  endif()
  set(byproducts "")
  _memfabric_configs(configs)
  get_property(multi GLOBAL PROPERTY GENERATOR_IS_MULTI_CONFIG)
  if(multi AND NOT CMAKE_VERSION VERSION_LESS 3.20)
    # Each configuration's rule makes its own files.
    set(configs "$<CONFIG>")
  endif()
  foreach(config IN LISTS configs)
    _memfabric_directories(target folder "${config}")
    if(config STREQUAL "$<CONFIG>")
      set(folder "${artifacts}")
    endif()
    foreach(file IN LISTS files)
      list(APPEND byproducts "${folder}/${file}")
    endforeach()
    foreach(header IN LISTS headers)
      list(APPEND byproducts "${target}/cxxbridge/${header}")
    endforeach()
  endforeach()
  add_custom_target(
    ${name}
    COMMAND
      ${CMAKE_COMMAND} -E env --unset=CARGO_BUILD_TARGET ${environment}
      "${MEMFABRIC_CARGO}" build --locked
      "$<IF:$<CONFIG:Debug>,--profile=dev,--profile=release>" ${target_option}
      ${detector} ${ARGN}
    BYPRODUCTS ${byproducts}
    WORKING_DIRECTORY "${MEMFABRIC_ROOT}"
    COMMENT "cargo: ${name}"
    USES_TERMINAL VERBATIM COMMAND_EXPAND_LISTS)
endfunction()

# Says where the file of an imported target is, for each configuration.
function(_memfabric_locate target file)
  _memfabric_configs(configs)
  foreach(config IN LISTS configs)
    _memfabric_directories(ignored folder "${config}")
    string(TOUPPER "${config}" suffix)
    set_property(TARGET ${target} PROPERTY IMPORTED_LOCATION_${suffix}
                                           "${folder}/${file}")
    set_property(
      TARGET ${target}
      APPEND
      PROPERTY IMPORTED_CONFIGURATIONS ${suffix})
  endforeach()
  # For a configuration that is asked for and is none of these.
  list(GET configs 0 config)
  _memfabric_directories(ignored folder "${config}")
  set_property(TARGET ${target} PROPERTY IMPORTED_LOCATION "${folder}/${file}")
endfunction()

function(memfabric_add_core)
  _memfabric_find_rust()
  set(library libmemfabric_transport.a)
  _memfabric_cargo_build(
    memfabric_core_build
    "${library}"
    "memfabric-transport/src/bridge.rs.h"
    -p
    memfabric-transport
    --lib)

  # What the standard library needs is the compiler's to say.
  set(target_option "")
  if(CARGO_BUILD_TARGET)
    set(target_option --target "${CARGO_BUILD_TARGET}")
  endif()
  set(empty "${CMAKE_BINARY_DIR}/memfabric-cargo/empty")
  file(WRITE "${empty}.rs" "")
  execute_process(
    COMMAND "${MEMFABRIC_RUSTC}" ${target_option} --crate-type staticlib --print
            native-static-libs -o "${empty}.a" "${empty}.rs"
    WORKING_DIRECTORY "${MEMFABRIC_ROOT}"
    OUTPUT_VARIABLE output
    ERROR_VARIABLE error
    RESULT_VARIABLE result)
  file(REMOVE "${empty}.rs" "${empty}.a")
  if(NOT result EQUAL 0 OR NOT "${output}${error}" MATCHES
                           "native-static-libs: ([^\n]*)")
    message(
      FATAL_ERROR
        "${MEMFABRIC_RUSTC} cannot build a static library (${result}): ${output}${error}\nFor another machine its standard library must be installed: 'rustup target add ${CARGO_BUILD_TARGET}'."
    )
  endif()
  string(STRIP "${CMAKE_MATCH_1}" system_libraries)
  separate_arguments(system_libraries UNIX_COMMAND "${system_libraries}")

  # GLOBAL: the tests of a surrounding project link it from another directory.
  add_library(memfabric_core STATIC IMPORTED GLOBAL)
  _memfabric_locate(memfabric_core "${library}")
  add_dependencies(memfabric_core memfabric_core_build)
  _memfabric_configs(configs)
  foreach(config IN LISTS configs)
    # An include directory of an imported target must exist.
    _memfabric_directories(target_dir ignored "${config}")
    file(MAKE_DIRECTORY "${target_dir}/cxxbridge")
  endforeach()
  _memfabric_directories(target_dir ignored)
  target_include_directories(memfabric_core INTERFACE "${target_dir}/cxxbridge")
  # Not imported, so that our own headers are no system headers, whose warnings
  # are not shown.
  add_library(memfabric_headers INTERFACE)
  target_include_directories(memfabric_headers
                             INTERFACE "${MEMFABRIC_ROOT}/include")
  target_link_libraries(memfabric_core INTERFACE memfabric_headers
                                                 ${system_libraries})
  # A shared object that contains the core shows none of Rust's symbols, nor the
  # bridge's: two of them in one process must not take each other's.
  target_link_options(memfabric_core INTERFACE
                      "LINKER:--exclude-libs,${library}")
  # Nor is it ever unloaded: libmf_smem.so keeps pointers to functions of the core,
  # which its threads call, and Rust has destructors of its own for each thread.
  set(type "$<TARGET_PROPERTY:TYPE>")
  string(CONCAT shared "$<OR:$<STREQUAL:${type},SHARED_LIBRARY>,"
                "$<STREQUAL:${type},MODULE_LIBRARY>>")
  target_link_options(memfabric_core INTERFACE
                      "$<${shared}:LINKER:-z,nodelete>")
  if(MEMFABRIC_SANITIZE STREQUAL "thread")
    set(program "$<STREQUAL:$<TARGET_PROPERTY:TYPE>,EXECUTABLE>")
    string(CONCAT runtime "LINKER:--whole-archive,${MEMFABRIC_TSAN_RUNTIME},"
                  "--no-whole-archive,--export-dynamic-symbol=__tsan_*")
    target_link_options(memfabric_core INTERFACE "$<${program}:${runtime}>")
  endif()
endfunction()

function(memfabric_add_emulator)
  _memfabric_cargo_build(
    memfabric_emulator_build
    "libmf_smem.so;libascendcl.so"
    ""
    -p
    memfabric-emulator
    -p
    memfabric-emulator-ascendcl)
  foreach(pair memfabric_emulator=libmf_smem.so
               memfabric_emulator_ascendcl=libascendcl.so)
    string(REPLACE "=" ";" pair "${pair}")
    list(GET pair 0 target)
    list(GET pair 1 file)
    add_library(${target} SHARED IMPORTED GLOBAL)
    _memfabric_locate(${target} "${file}")
    add_dependencies(${target} memfabric_emulator_build)
  endforeach()
endfunction()
