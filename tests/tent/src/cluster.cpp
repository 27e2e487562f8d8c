// SPDX-License-Identifier: Apache-2.0

#include "tent_double/cluster.h"

#include <mutex>
#include <unordered_map>

namespace tent_double {

namespace {

using mooncake::tent::json;
using mooncake::tent::Status;

struct Answer {
    Status status;
    std::string text;
};

std::mutex mutex;
std::unordered_map<std::string, Answer> answers;
std::unordered_map<std::string, uint64_t> fetch_counts;

}  // namespace

void describe(const std::string& name,
              const mooncake::tent::SegmentDesc& segment) {
    answer(name, json(segment).dump());
}

void answer(const std::string& name, const std::string& text) {
    std::lock_guard<std::mutex> lock(mutex);
    answers[name] = {Status::OK(), text};
}

void unreachable(const std::string& name, Status status) {
    std::lock_guard<std::mutex> lock(mutex);
    answers[name] = {std::move(status), ""};
}

void forget(const std::string& name) {
    std::lock_guard<std::mutex> lock(mutex);
    answers.erase(name);
}

void forgetAll() {
    std::lock_guard<std::mutex> lock(mutex);
    answers.clear();
    fetch_counts.clear();
}

uint64_t fetches(const std::string& name) {
    std::lock_guard<std::mutex> lock(mutex);
    return fetch_counts[name];
}

std::optional<Status> fetch(const std::string& name, std::string& text) {
    std::lock_guard<std::mutex> lock(mutex);
    ++fetch_counts[name];
    auto found = answers.find(name);
    if (found == answers.end()) return std::nullopt;
    text = found->second.text;
    return found->second.status;
}

}  // namespace tent_double
