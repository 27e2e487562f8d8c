// SPDX-License-Identifier: Apache-2.0

#include "tent/runtime/segment_manager.h"

#include <sys/stat.h>

#include "metadata_socket.h"
#include "tent_double/cluster.h"

namespace mooncake {
namespace tent {

namespace {

using tent_double::Call;
using tent_double::pass;

// One thread's copies of the peers of one manager.
struct Cache {
    uint64_t version = 0;
    std::unordered_map<SegmentID, SegmentDescRef> segments;
};

// Managers have numbers because an address may be used again.
Cache& cacheOf(uint64_t manager) {
    thread_local std::unordered_map<uint64_t, Cache> caches;
    return caches[manager];
}

std::atomic<uint64_t> managers{0};

Status describeFile(SegmentDescRef& desc, const std::string& name) {
    FileBufferDesc buffer;
    buffer.path = name.substr(kLocalFileSegmentPrefix.size());
    struct stat file;
    if (stat(buffer.path.c_str(), &file) != 0 || !S_ISREG(file.st_mode)) {
        return Status::InvalidArgument("Invalid path: " + buffer.path);
    }
    buffer.length = static_cast<uint64_t>(file.st_size);
    buffer.offset = 0;
    desc = std::make_shared<SegmentDesc>();
    desc->name = name;
    desc->type = SegmentType::File;
    desc->detail = FileSegmentDesc{{buffer}};
    return Status::OK();
}

}  // namespace

SegmentManager::SegmentManager()
    : number_(managers.fetch_add(1)), local_(std::make_shared<SegmentDesc>()) {}

Status SegmentManager::openRemote(SegmentID& handle,
                                  const std::string& segment_name) {
    std::lock_guard<std::mutex> lock(names_mutex_);
    for (const auto& [id, name] : names_) {
        if (name == segment_name) {
            handle = id;
            return Status::OK();
        }
    }
    handle = next_id_++;
    names_[handle] = segment_name;
    version_.fetch_add(1);
    return Status::OK();
}

Status SegmentManager::closeRemote(SegmentID handle) {
    std::lock_guard<std::mutex> lock(names_mutex_);
    if (names_.erase(handle) == 0) {
        return Status::InvalidArgument("Invalid segment handle");
    }
    version_.fetch_add(1);
    return Status::OK();
}

Status SegmentManager::getRemoteCached(SegmentDesc*& desc, SegmentID handle) {
    SegmentDescRef owned;
    CHECK_STATUS(getRemoteCached(owned, handle));
    desc = owned.get();
    return Status::OK();
}

Status SegmentManager::getRemoteCached(SegmentDescRef& desc, SegmentID handle) {
    CHECK_STATUS(pass(Call::kGetRemoteCached));
    auto& cache = cacheOf(number_);
    uint64_t version = version_.load();
    if (cache.version != version) cache = {version, {}};
    auto found = cache.segments.find(handle);
    if (found == cache.segments.end()) {
        SegmentDescRef fetched;
        CHECK_STATUS(fetch(fetched, handle));
        found = cache.segments.emplace(handle, std::move(fetched)).first;
    }
    desc = found->second;
    return Status::OK();
}

Status SegmentManager::fetch(SegmentDescRef& desc, SegmentID handle) {
    std::string name;
    {
        std::lock_guard<std::mutex> lock(names_mutex_);
        auto found = names_.find(handle);
        if (found == names_.end()) {
            return Status::InvalidArgument("Invalid segment handle");
        }
        name = found->second;
    }
    if (name.starts_with(kLocalFileSegmentPrefix)) {
        return describeFile(desc, name);
    }
    std::string text;
    auto scripted = tent_double::fetch(name, text);
    CHECK_STATUS(scripted ? *scripted : tent_double::ask(name, text));
    if (text.empty()) {
        return Status::InvalidEntry("Segment " + name + " not found");
    }
    // Throws if the text is no description, as the real one does.
    desc = std::make_shared<SegmentDesc>(json::parse(text).get<SegmentDesc>());
    return Status::OK();
}

Status SegmentManager::invalidateRemote(SegmentID handle) {
    CHECK_STATUS(pass(Call::kInvalidateRemote));
    cacheOf(number_).segments.erase(handle);
    return Status::OK();
}

Status SegmentManager::invalidateAllCacheForRemote(
    const std::string& /*segment_name*/) {
    CHECK_STATUS(pass(Call::kInvalidateAll));
    version_.fetch_add(1);
    return Status::OK();
}

SegmentDescRef SegmentManager::getLocal() {
    tent_double::passOrThrow(Call::kGetLocal);
    std::lock_guard<std::mutex> lock(local_mutex_);
    return local_;
}

Status SegmentManager::updateLocal(
    const std::function<Status(SegmentDesc&)>& mutator) {
    CHECK_STATUS(pass(Call::kUpdateLocal));
    std::lock_guard<std::mutex> update(update_mutex_);
    // Nobody else writes to local_ meanwhile.
    auto next = std::make_shared<SegmentDesc>(*local_);
    CHECK_STATUS(mutator(*next));
    std::lock_guard<std::mutex> lock(local_mutex_);
    local_ = std::move(next);
    return Status::OK();
}

Status SegmentManager::synchronizeLocal() {
    return pass(Call::kSynchronizeLocal);
}

std::shared_ptr<const std::string> SegmentManager::getLocalDumpedJson() {
    SegmentDescRef snapshot;
    {
        std::lock_guard<std::mutex> lock(local_mutex_);
        snapshot = local_;
    }
    return std::make_shared<const std::string>(json(*snapshot).dump());
}

}  // namespace tent
}  // namespace mooncake
