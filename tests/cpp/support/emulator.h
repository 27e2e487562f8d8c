// SPDX-License-Identifier: Apache-2.0

// The emulated libmf_smem.so and libascendcl.so of this process: what a test
// tells them, and what they saw.

#ifndef MEMFABRIC_TESTS_SUPPORT_EMULATOR_H
#define MEMFABRIC_TESTS_SUPPORT_EMULATOR_H

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace memfabric_test {

// The library that the transport loads by name: the first one that the dynamic
// linker finds. Throws if that is not the emulator.
class Emulator {
   public:
    static Emulator& get();

    // Knobs; see the emulator's own documentation for the rules.

    // Replaces the script; throws if it is not understood.
    void script(const std::string& rules);
    // Lets go of what is blocked or held.
    void release() { release_(); }
    // Calls every peer-down callback with this name.
    void peerDown(const char* peer) { peer_down_(peer); }
    // Forgets script, counters, violations and log.
    void reset() { reset_(); }

    // Observations.

    uint64_t count(const char* counter);
    // How the caller broke the library's contract.
    std::vector<std::string> violations();
    // One line a call, since `log` was in a script. With a name, its calls.
    std::vector<std::string> calls(const std::string& name = "");

   private:
    Emulator();

    int (*script_)(const char*);
    const char* (*last_error_)();
    uint64_t (*count_)(const char*);
    size_t (*violation_)(uint64_t, char*, size_t);
    size_t (*call_)(uint64_t, char*, size_t);
    void (*release_)();
    void (*reset_)();
    uint64_t (*peer_down_)(const char*);
};

class AscendEmulator {
   public:
    static AscendEmulator& get();

    // The calling thread's device; negative: none.
    void (*setDevice)(int32_t device);
    // Memory that ends the process when the CPU touches it.
    void* (*allocate)(size_t size, int32_t device);
    void (*free)(void* pointer);
    // Where the CPU can touch the same bytes.
    void* (*alias)(const void* pointer);
    // Makes a function of CANN's answer a code on every thread; 0 ends it.
    void (*fail)(const char* function, int code);
    // How all memory that is not a device's is reported from now on.
    void (*setHostLocation)(uint32_t location_type);

    // Calls of a function of CANN's.
    uint64_t count(const char* function);

   private:
    AscendEmulator();

    uint64_t (*count_)(const char*);
};

// A value in a line of the call log, as in `opcode=1`; empty if there is none.
std::string field(const std::string& call, const std::string& name);

}  // namespace memfabric_test

#endif  // MEMFABRIC_TESTS_SUPPORT_EMULATOR_H
