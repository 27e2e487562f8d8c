// SPDX-License-Identifier: Apache-2.0

#include "tent/common/config.h"

namespace mooncake {
namespace tent {

namespace {

// Calls `step` with each level of `path` until it answers false.
template <typename Step>
void walk(const std::string& path, Step step) {
    for (size_t start = 0; start < path.size();) {
        size_t end = std::min(path.find('/', start), path.size());
        if (end > start && !step(path.substr(start, end - start))) return;
        start = end + 1;
    }
}

}  // namespace

const json* Config::nested(const std::string& path) const {
    const json* value = &root_;
    walk(path, [&](const std::string& level) {
        auto found = value->find(level);
        value = found == value->end() ? nullptr : &*found;
        return value != nullptr;
    });
    return value != nullptr && !value->is_null() ? value : nullptr;
}

const json* Config::flat(const std::string& path) const {
    auto found = root_.find(path);
    return found != root_.end() && !found->is_null() ? &*found : nullptr;
}

json& Config::create(const std::string& path) {
    json* value = &root_;
    walk(path, [&](const std::string& level) {
        value = &(*value)[level];
        return true;
    });
    return *value;
}

bool Config::contains(const std::string& path) const {
    tent_double::passOrThrow(tent_double::Call::kConfigGet);
    std::lock_guard<std::mutex> lock(mutex_);
    return !path.empty() && (nested(path) || flat(path));
}

Status Config::load(const std::string& text) {
    std::lock_guard<std::mutex> lock(mutex_);
    try {
        root_ = json::parse(text);
    } catch (const std::exception& error) {
        return Status::InvalidArgument(std::string("Invalid JSON: ") +
                                       error.what());
    }
    return Status::OK();
}

std::string Config::dump(int indent) const {
    std::lock_guard<std::mutex> lock(mutex_);
    return root_.dump(indent);
}

bool Config::dumpSubtree(const std::string& path, std::string* text) const {
    tent_double::passOrThrow(tent_double::Call::kConfigGet);
    if (text == nullptr || path.empty()) return false;
    std::lock_guard<std::mutex> lock(mutex_);
    const json* value = nested(path);
    if (value == nullptr) value = flat(path);
    if (value == nullptr) return false;
    *text = value->dump();
    return true;
}

}  // namespace tent
}  // namespace mooncake
