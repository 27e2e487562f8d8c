// SPDX-License-Identifier: Apache-2.0

#include "support/process.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <stdexcept>

extern char** environ;

namespace memfabric_test {

namespace {

constexpr char kRoleOption[] = "--memfabric_role=";

std::map<std::string, Role>& roles() {
    static std::map<std::string, Role> known;
    return known;
}

[[noreturn]] void fail(const char* what) {
    throw std::runtime_error(std::string(what) + ": " + std::strerror(errno));
}

std::vector<char*> pointers(std::vector<std::string>& texts) {
    std::vector<char*> result;
    for (auto& text : texts) result.push_back(text.data());
    result.push_back(nullptr);
    return result;
}

std::vector<std::string> environmentWith(const Environment& changes) {
    std::vector<std::string> result;
    for (char** entry = environ; *entry != nullptr; ++entry) {
        std::string text = *entry;
        if (!changes.count(text.substr(0, text.find('=')))) {
            result.push_back(std::move(text));
        }
    }
    for (const auto& [name, value] : changes) {
        if (!value.empty()) result.push_back(name + "=" + value);
    }
    return result;
}

}  // namespace

bool addRole(const std::string& name, Role role) {
    return roles().emplace(name, std::move(role)).second;
}

bool runRole(int argc, char** argv, int* exit_status) {
    if (argc < 2 || !std::string(argv[1]).starts_with(kRoleOption)) {
        return false;
    }
    const auto role = roles().find(argv[1] + std::strlen(kRoleOption));
    if (role == roles().end()) {
        std::fprintf(stderr, "no role: %s\n", argv[1]);
        *exit_status = 2;
        return true;
    }
    *exit_status =
        role->second(std::vector<std::string>(argv + 2, argv + argc));
    return true;
}

Process::Process(const std::string& role,
                 const std::vector<std::string>& arguments,
                 const Environment& environment) {
    // By its path, because under valgrind the link names valgrind to others.
    std::vector<std::string> command = {
        std::filesystem::read_symlink("/proc/self/exe"), kRoleOption + role};
    command.insert(command.end(), arguments.begin(), arguments.end());
    // All of it before the fork: afterwards only system calls are safe, for
    // the program has threads.
    std::vector<std::string> variables = environmentWith(environment);
    const auto argv = pointers(command);
    const auto envp = pointers(variables);
    int to_child[2];
    int from_child[2];
    log_ = std::tmpfile();
    if (log_ == nullptr || pipe2(to_child, O_CLOEXEC) != 0 ||
        pipe2(from_child, O_CLOEXEC) != 0) {
        fail("pipe");
    }
    pid_ = fork();
    if (pid_ < 0) fail("fork");
    if (pid_ == 0) {
        dup2(to_child[0], STDIN_FILENO);
        dup2(from_child[1], STDOUT_FILENO);
        dup2(fileno(log_), STDERR_FILENO);
        execve(argv[0], argv.data(), envp.data());
        _exit(127);
    }
    close(to_child[0]);
    close(from_child[1]);
    input_ = fdopen(to_child[1], "w");
    output_ = fdopen(from_child[0], "r");
    if (input_ == nullptr || output_ == nullptr) fail("fdopen");
}

Process::~Process() {
    if (pid_ > 0) {
        kill();
        wait();
    }
    if (input_ != nullptr) std::fclose(input_);
    std::fclose(output_);
    std::fclose(log_);
}

std::string Process::readLine() {
    std::string line;
    for (int c; (c = std::fgetc(output_)) != EOF && c != '\n';) {
        line.push_back(static_cast<char>(c));
    }
    return line;
}

std::string Process::readAll() {
    std::string text;
    for (int c; (c = std::fgetc(output_)) != EOF;) {
        text.push_back(static_cast<char>(c));
    }
    return text;
}

void Process::writeLine(const std::string& line) {
    std::fputs((line + "\n").c_str(), input_);
    std::fflush(input_);
}

int Process::wait() {
    if (input_ != nullptr) std::fclose(input_);
    input_ = nullptr;
    int status = 0;
    if (waitpid(pid_, &status, 0) != pid_) fail("waitpid");
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

void Process::kill() { ::kill(pid_, SIGKILL); }

std::string Process::log() {
    std::string text;
    // The child writes at the shared offset, so it is not moved.
    char buffer[4096];
    ssize_t length;
    while ((length = pread(fileno(log_), buffer, sizeof(buffer),
                           static_cast<off_t>(text.size()))) > 0) {
        text.append(buffer, static_cast<size_t>(length));
    }
    return text;
}

}  // namespace memfabric_test
