// SPDX-License-Identifier: Apache-2.0

// Other processes of a test: this program again, in a role and with an
// environment of its own.

#ifndef MEMFABRIC_TESTS_SUPPORT_PROCESS_H
#define MEMFABRIC_TESTS_SUPPORT_PROCESS_H

#include <sys/types.h>

#include <cstdio>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace memfabric_test {

// Variables that are set, or unset with an empty value.
using Environment = std::map<std::string, std::string>;

// What a process does instead of the tests; its result is the exit status.
using Role = std::function<int(const std::vector<std::string>& arguments)>;

// Makes a role known; for initialisers of constants.
bool addRole(const std::string& name, Role role);

// For main(): runs the role that the command line asks for, if it does.
bool runRole(int argc, char** argv, int* exit_status);

class Process {
   public:
    // Starts this program in `role`.
    Process(const std::string& role, const std::vector<std::string>& arguments,
            const Environment& environment = {});
    // Kills it if it is still there.
    ~Process();
    Process(const Process&) = delete;
    Process& operator=(const Process&) = delete;

    // Its next line of output without the line end; empty at the end.
    std::string readLine();
    // All of its further output.
    std::string readAll();
    // Gives it a line of input.
    void writeLine(const std::string& line);
    // Ends its input and waits; 128 + n if it died of signal n.
    int wait();
    void kill();

    // Its standard error so far.
    std::string log();

   private:
    pid_t pid_ = -1;
    FILE* output_ = nullptr;
    FILE* input_ = nullptr;
    FILE* log_ = nullptr;
};

}  // namespace memfabric_test

#endif  // MEMFABRIC_TESTS_SUPPORT_PROCESS_H
