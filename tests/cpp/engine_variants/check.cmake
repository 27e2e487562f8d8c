# SPDX-License-Identifier: Apache-2.0
# Fails unless the shim's declaration compiles against each engine that calls
# quiesce() and warmupSegment() as ours, or has none, and stops the build at each
# engine whose calls would not reach ours. COMPILER compiles, with the headers of
# the directories in the file INCLUDES.

cmake_minimum_required(VERSION 3.16)

set(source "${CMAKE_CURRENT_LIST_DIR}/shim.cpp")
file(READ "${INCLUDES}" includes)
string(STRIP "${includes}" includes)
list(TRANSFORM includes PREPEND "-I")

# Compiles with `quiesce` and `warmup` as the engine's declarations; the result,
# and what the compiler said.
function(compile quiesce warmup)
  execute_process(
    COMMAND
      "${COMPILER}" -std=c++20 -fsyntax-only -Wall -Wextra -Wpedantic -Werror
      -DTENT_DOUBLE_GENERATION_B "-DTENT_DOUBLE_QUIESCE=${quiesce}"
      "-DTENT_DOUBLE_WARMUP_SEGMENT=${warmup}" ${includes} "${source}"
    OUTPUT_VARIABLE output
    ERROR_VARIABLE output
    RESULT_VARIABLE result)
  set(result
      "${result}"
      PARENT_SCOPE)
  set(output
      "${output}"
      PARENT_SCOPE)
endfunction()

function(accepts quiesce warmup)
  compile("${quiesce}" "${warmup}")
  if(NOT result EQUAL 0)
    message(SEND_ERROR "refused: '${quiesce}' '${warmup}':\n${output}")
  endif()
endfunction()

# The compiler's words must have `name` in them.
function(refuses quiesce warmup name)
  compile("${quiesce}" "${warmup}")
  if(result EQUAL 0)
    message(SEND_ERROR "accepted: '${quiesce}' '${warmup}'")
  elseif(NOT output MATCHES "${name}")
    message(SEND_ERROR "says nothing of ${name}:\n${output}")
  endif()
endfunction()

set(body "{ return Status::OK(); }")
set(quiesce "virtual Status quiesce() ${body}")
set(warmup "virtual Status warmupSegment(SegmentID) ${body}")
accepts("${quiesce}" "${warmup}")
accepts("" "")
# Renamed, which only `memfabric integrate --check` can see.
accepts("virtual Status drain() ${body}" "${warmup}")

refuses("Status quiesce() ${body}" "${warmup}" "QuiesceMustBeVirtual")
refuses("virtual Status quiesce() final ${body}" "${warmup}"
        "QuiesceMustBeVirtual")
set(changed "Transport::quiesce changed")
refuses("${quiesce} virtual Status quiesce(int) ${body}" "${warmup}"
        "${changed}")
refuses("virtual Status quiesce(int) ${body}" "${warmup}" "${changed}")
refuses("virtual Status quiesce() const ${body}" "${warmup}" "${changed}")
refuses("template <typename T> Status quiesce(T) ${body}" "${warmup}"
        "${changed}")
refuses("int quiesce = 0;" "${warmup}" "${changed}")
refuses("${quiesce}" "Status warmupSegment(SegmentID) ${body}"
        "WarmupSegmentMustBeVirtual")
refuses(
  "${quiesce}" "${warmup} virtual Status warmupSegment(SegmentID, int) ${body}"
  "Transport::warmupSegment changed")
refuses("${quiesce}" "virtual Status warmupSegment(const std::string&) ${body}"
        "Transport::warmupSegment changed")
