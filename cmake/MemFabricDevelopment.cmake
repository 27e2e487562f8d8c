# SPDX-License-Identifier: Apache-2.0
# How this repository's own C++ is compiled when it is built on its own.
#
# memfabric_development: to be linked PRIVATE, by our targets only.

set(MEMFABRIC_SANITIZE
    ""
    CACHE STRING
          "address,undefined: the C++ side; thread: both sides; empty: no sanitizer"
)

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE
      RelWithDebInfo
      CACHE STRING "Debug, Release, RelWithDebInfo or MinSizeRel" FORCE)
endif()
set(CMAKE_CXX_EXTENSIONS OFF)

add_library(memfabric_development INTERFACE)
target_compile_options(memfabric_development INTERFACE -Wall -Wextra -Wpedantic
                                                       -Werror)
if(MEMFABRIC_SANITIZE)
  target_compile_options(
    memfabric_development INTERFACE "-fsanitize=${MEMFABRIC_SANITIZE}"
                                    -fno-omit-frame-pointer)
endif()
# The race detector's runtime is Rust's, and comes with memfabric_core.
if(MEMFABRIC_SANITIZE AND NOT MEMFABRIC_SANITIZE STREQUAL "thread")
  target_link_options(memfabric_development INTERFACE
                      "-fsanitize=${MEMFABRIC_SANITIZE}")
endif()
