// SPDX-License-Identifier: Apache-2.0

#include "support/emulator.h"

#include <dlfcn.h>

#include <stdexcept>

namespace memfabric_test {

namespace {

void* open(const char* name) {
    void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        throw std::runtime_error(
            std::string(dlerror()) +
            "; run the test with LD_LIBRARY_PATH=" + MEMFABRIC_EMULATOR_DIR);
    }
    return library;
}

template <typename Function>
void find(void* library, const char* name, Function*& function) {
    void* symbol = dlsym(library, name);
    if (symbol == nullptr) {
        throw std::runtime_error(std::string(name) +
                                 " missing, so this is no emulator; run the "
                                 "test with LD_LIBRARY_PATH=" +
                                 MEMFABRIC_EMULATOR_DIR);
    }
    function = reinterpret_cast<Function*>(symbol);
}

// What a function of the emulator writes into a buffer that is large enough.
template <typename Function>
std::string text(Function* function, uint64_t index) {
    std::string buffer(function(index, nullptr, 0), '\0');
    if (!buffer.empty()) function(index, buffer.data(), buffer.size() + 1);
    return buffer;
}

}  // namespace

Emulator& Emulator::get() {
    static Emulator emulator;
    return emulator;
}

Emulator::Emulator() {
    void* library = open("libmf_smem.so");
    find(library, "mf_emu_script", script_);
    find(library, "mf_emu_last_error", last_error_);
    find(library, "mf_emu_count", count_);
    find(library, "mf_emu_violation", violation_);
    find(library, "mf_emu_call", call_);
    find(library, "mf_emu_release", release_);
    find(library, "mf_emu_reset", reset_);
    find(library, "mf_emu_peer_down", peer_down_);
}

void Emulator::script(const std::string& rules) {
    if (script_(rules.c_str()) != 0) {
        throw std::runtime_error("script '" + rules + "': " + last_error_());
    }
}

uint64_t Emulator::count(const char* counter) {
    uint64_t value = count_(counter);
    if (value == UINT64_MAX) {
        throw std::runtime_error(std::string("no counter ") + counter);
    }
    return value;
}

std::vector<std::string> Emulator::violations() {
    std::vector<std::string> texts;
    for (std::string line; !(line = text(violation_, texts.size())).empty();) {
        texts.push_back(line);
    }
    return texts;
}

std::vector<std::string> Emulator::calls(const std::string& name) {
    std::vector<std::string> lines;
    uint64_t index = 0;
    for (std::string line; !(line = text(call_, index)).empty(); ++index) {
        if (name.empty() || line.starts_with(name + " ")) lines.push_back(line);
    }
    return lines;
}

AscendEmulator& AscendEmulator::get() {
    static AscendEmulator emulator;
    return emulator;
}

AscendEmulator::AscendEmulator() {
    void* library = open("libascendcl.so");
    find(library, "mf_emu_set_device", setDevice);
    find(library, "mf_emu_alloc_guarded_memory", allocate);
    find(library, "mf_emu_free_device_memory", free);
    find(library, "mf_emu_device_alias", alias);
    find(library, "mf_emu_acl_fail", fail);
    find(library, "mf_emu_set_host_location", setHostLocation);
    find(library, "mf_emu_acl_count", count_);
}

uint64_t AscendEmulator::count(const char* function) {
    const uint64_t value = count_(function);
    if (value == UINT64_MAX) {
        throw std::runtime_error(std::string("CANN has no ") + function);
    }
    return value;
}

std::string field(const std::string& call, const std::string& name) {
    size_t start = call.find(" " + name + "=");
    if (start == std::string::npos) return "";
    start += name.size() + 2;
    return call.substr(start, call.find(' ', start) - start);
}

}  // namespace memfabric_test
