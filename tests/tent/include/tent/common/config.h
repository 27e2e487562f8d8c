// SPDX-License-Identifier: Apache-2.0

// Double of TENT's configuration: a JSON value, looked into by path.

#ifndef TENT_CONFIG_H
#define TENT_CONFIG_H

#include <mutex>
#include <string>
#include <vector>

#include "tent/common/status.h"
#include "tent/common/types.h"
#include "tent/thirdparty/nlohmann/json.h"
#include "tent_double/faults.h"

namespace mooncake {
namespace tent {

using json = nlohmann::json;

class Config {
   public:
    // What `path` names: first level by level at the slashes, then as one key
    // of the top level. A value that does not convert to T is passed over in
    // silence, and numbers convert among themselves, with wrap-around.
    template <typename T>
    T get(const std::string& path, const T& default_value) const {
        tent_double::passOrThrow(tent_double::Call::kConfigGet);
        std::lock_guard<std::mutex> lock(mutex_);
        if (path.empty()) return default_value;
        for (const json* value : {nested(path), flat(path)}) {
            if (value == nullptr) continue;
            try {
                return value->get<T>();
            } catch (...) {
            }
        }
        return default_value;
    }

    std::string get(const std::string& path, const char* default_value) const {
        return get<std::string>(path, std::string(default_value));
    }

    bool contains(const std::string& path) const;

    template <typename T>
    std::vector<T> getArray(const std::string& path) const {
        return get<std::vector<T>>(path, {});
    }

    template <typename T>
    void set(const std::string& path, const T& value) {
        std::lock_guard<std::mutex> lock(mutex_);
        if (!path.empty()) create(path) = value;
    }

    // Replaces everything.
    Status load(const std::string& text);

    std::string dump(int indent = 2) const;

    // What `path` names, as text; false if it names nothing.
    bool dumpSubtree(const std::string& path, std::string* text) const;

   private:
    // Null if there is nothing, or a JSON null.
    const json* nested(const std::string& path) const;
    const json* flat(const std::string& path) const;
    json& create(const std::string& path);

    json root_;
    mutable std::mutex mutex_;
};

}  // namespace tent
}  // namespace mooncake

#endif  // TENT_CONFIG_H
