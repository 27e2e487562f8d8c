# SPDX-License-Identifier: Apache-2.0
# Fails if MODULE exports a symbol of Rust's runtime or of the bridge, or can be
# unloaded; NM lists symbols, READELF what the loader is told, ARCHIVE is where
# the symbols come from.

cmake_minimum_required(VERSION 3.16)

function(symbols result)
  execute_process(
    COMMAND "${NM}" ${ARGN}
    OUTPUT_VARIABLE output
    ERROR_VARIABLE error
    RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "${NM} ${ARGN} failed (${status}): ${error}")
  endif()
  string(REPLACE ";" "," output "${output}")
  string(REPLACE "\n" ";" output "${output}")
  list(FILTER output INCLUDE REGEX
       "cxxbridge1|rust_eh_personality|_ZN4core|_ZN3std[0-9]|_RNv|__rust_")
  set(${result}
      "${output}"
      PARENT_SCOPE)
endfunction()

# A check of nothing would succeed as well.
symbols(inside --defined-only "${ARCHIVE}")
list(LENGTH inside count)
if(count LESS 10)
  message(
    FATAL_ERROR "${ARCHIVE} has ${count} such symbols: this finds nothing")
endif()
symbols(linked --defined-only "${MODULE}")
symbols(exported --defined-only --dynamic "${MODULE}")
list(LENGTH linked linked_count)
list(LENGTH exported exported_count)
if(exported_count GREATER 0)
  list(JOIN exported "\n  " text)
  message(FATAL_ERROR "${MODULE} exports ${exported_count}:\n  ${text}")
endif()
if(linked_count LESS 10)
  message(
    FATAL_ERROR
      "${MODULE} contains ${linked_count} such symbols: the core is not inside")
endif()
message(STATUS "${linked_count} inside, none exported")

# A16: the library keeps pointers to functions of the core.
execute_process(
  COMMAND "${READELF}" --dynamic --wide "${MODULE}"
  OUTPUT_VARIABLE dynamic
  RESULT_VARIABLE status)
if(NOT status EQUAL 0 OR NOT dynamic MATCHES "FLAGS_1[^\n]*NODELETE")
  message(FATAL_ERROR "${MODULE} can be unloaded (${status}):\n${dynamic}")
endif()
