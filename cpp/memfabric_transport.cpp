// SPDX-License-Identifier: Apache-2.0

#include "tent/transport/memfabric/memfabric_transport.h"

#include <glog/logging.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>
#include <string_view>
#include <thread>
#include <typeinfo>
#include <unordered_map>
#include <utility>

#include "memfabric-transport/src/bridge.rs.h"
#include "memfabric/log_sink.h"
#include "tent/common/config.h"
#include "tent/runtime/segment_manager.h"

namespace mooncake {
namespace tent {

namespace {

// The key under which a process advertises its endpoint, "ip:port". Peers that
// run the C++ transport read the same one, so it cannot change.
constexpr char kEndpointKey[] = "memfabric_unique_id";

// The core answers with TENT's codes, so that no table is needed here.
constexpr auto code(Status::Code code) { return static_cast<uint16_t>(code); }
static_assert(code(Status::Code::kOk) == 0);
static_assert(code(Status::Code::kInvalidArgument) == 1);
static_assert(code(Status::Code::kTooManyRequests) == 2);
static_assert(code(Status::Code::kDeviceNotFound) == 4);
static_assert(code(Status::Code::kInternalError) == 199);
// A request's opcode goes to the core as its number.
static_assert(static_cast<int>(Request::READ) == 0);
static_assert(static_cast<int>(Request::WRITE) == 1);

[[nodiscard]] Status toStatus(const memfabric::Outcome &outcome) {
    if (outcome.code == 0) return Status::OK();
    return Status(
        static_cast<Status::Code>(outcome.code),
        std::string_view(outcome.message.data(), outcome.message.size()));
}

// The exception that is being handled, as a status that names the method. Never
// inlined, as it would burden the path on which nothing is thrown.
[[nodiscard, gnu::cold, gnu::noinline]] Status thrown(
    const char *method) noexcept {
    try {
        try {
            throw;
        } catch (const std::exception &e) {
            return Status::InternalError(std::string("memfabric ") + method +
                                         " failed: " + e.what());
        } catch (...) {
            return Status::InternalError(std::string("memfabric ") + method +
                                         " failed: unknown exception");
        }
    } catch (...) {
        return Status(Status::Code::kInternalError, method);
    }
}

// Runs one method's body; an exception becomes a status that names the method.
// TENT, its JSON library and its RPC all throw, and some of the engine's
// threads end the process when an exception reaches them.
template <typename Body>
[[nodiscard]] Status guard(const char *method, Body body) noexcept {
    try {
        return body();
    } catch (...) {
        return thrown(method);
    }
}

void writeToGlog(int32_t severity, rust::Str file, uint32_t line,
                 rust::Str message) {
    const std::string path(file);
    google::LogMessage(path.c_str(), static_cast<int>(line), severity).stream()
        << std::string_view(message.data(), message.size());
}

// What is really there: TENT's typed getters turn a value of another type into
// the default, or wrap it, without a word.
memfabric::Setting setting(const rust::String &path, const json &value) {
    using memfabric::SettingKind;
    memfabric::Setting result{path, SettingKind::Other, {}, 0};
    if (value.is_string()) {
        result.kind = SettingKind::Text;
        result.text = rust::String::lossy(value.get<std::string>());
    } else if (value.is_number_integer() &&
               (!value.is_number_unsigned() ||
                value.get<uint64_t>() <= uint64_t{INT64_MAX})) {
        result.kind = SettingKind::Integer;
        result.integer = value.get<int64_t>();
    } else {
        result.text = value.dump();
    }
    return result;
}

memfabric::Settings settingsOf(const Config *conf) {
    memfabric::Settings result;
    if (!conf) return result;
    for (auto &path : memfabric::settingPaths()) {
        const std::string key(path);
        if (!conf->contains(key)) continue;
        result.keys.push_back(setting(path, conf->get<json>(key, json())));
    }
    return result;
}

memfabric::Region region(const BufferDesc &desc) {
    return {static_cast<size_t>(desc.addr), static_cast<size_t>(desc.length)};
}

auto &deviceAttrs(SegmentDesc &desc) {
    return std::get<MemorySegmentDesc>(desc.detail).device_attrs;
}

// Whether it is text is for the core to see, and only where it is read.
rust::Slice<const uint8_t> bytes(std::string_view text) {
    return {reinterpret_cast<const uint8_t *>(text.data()), text.size()};
}

rust::Slice<const uint8_t> bytesOf(const rust::String &text) {
    return bytes(std::string_view(text.data(), text.size()));
}

class MemFabricSubBatch final : public Transport::SubBatch {
   public:
    MemFabricSubBatch(const memfabric::Transport &core, size_t max_size)
        : core(&core), tasks(core.allocate(max_size)) {}

    size_t size() const override { return tasks->size(); }

    // The length of a task that is known to be completed, else null.
    const uint64_t *completed(int task_id) const {
        const size_t count = completed_.load(std::memory_order_acquire);
        if (static_cast<size_t>(task_id) >= count) return nullptr;
        return lengths_.load(std::memory_order_relaxed) + task_id;
    }

    // Asks the core. Apart, for nearly every poll of a sweep does without it.
    [[gnu::noinline]] Status poll(int task_id, TransferStatus &status);

    // Whose it is.
    const memfabric::Transport *const core;
    rust::Box<memfabric::SubBatch> tasks;

   private:
    // Of the first tasks; the array is in `tasks`. The counter is the one to
    // read first.
    std::atomic<const uint64_t *> lengths_{nullptr};
    std::atomic<size_t> completed_{0};
};

Status MemFabricSubBatch::poll(int task_id, TransferStatus &status) {
    return guard("getTransferStatus", [&] {
        const auto polled = core->poll(*tasks, task_id);
        switch (polled.state) {
            case memfabric::TaskState::Completed:
                status = {TransferStatusEnum::COMPLETED, polled.bytes};
                break;
            case memfabric::TaskState::Failed:
                status = {TransferStatusEnum::FAILED, polled.bytes};
                return Status::OK();
            case memfabric::TaskState::Pending:
                status = {TransferStatusEnum::PENDING, polled.bytes};
                return Status::OK();
            default:
                return toStatus(memfabric::pollError());
        }
        if (!polled.last) return Status::OK();
        const auto lengths = tasks->completed();
        if (!lengths.empty()) {
            lengths_.store(lengths.data(), std::memory_order_relaxed);
            completed_.store(lengths.size(), std::memory_order_release);
        }
        return Status::OK();
    });
}

// Null if it is null or another transport's. The type is this file's own, so it
// is known by its address; a dynamic_cast, which also looks for base classes,
// costs more than the rest of a poll.
MemFabricSubBatch *own(Transport::SubBatchRef batch,
                       const memfabric::Transport &core) {
    if (!batch || &typeid(*batch) != &typeid(MemFabricSubBatch)) return nullptr;
    auto *ours = static_cast<MemFabricSubBatch *>(batch);
    return ours->core == &core ? ours : nullptr;
}

[[nodiscard, gnu::cold, gnu::noinline]] Status notOurs(const char *method) {
    return guard(method, [&] {
        return Status::InvalidArgument(
            std::string("memfabric ") + method +
            ": the sub-batch is null or another transport's");
    });
}

// One distinct target of a call. The views in `peer` point into `pin`, which
// keeps the description alive, or into `problem`.
struct Target {
    SegmentID id;
    SegmentDescRef pin{};
    std::optional<rust::String> problem{};
    memfabric::Peer peer{};
    // Whether its description was dropped and read again in this call.
    bool read_again = false;
    // Where in the call's peers the requests go whose memory is not in the new
    // description; 0 if there are none, for the target itself comes first.
    uint32_t without_memory = 0;
};

// Up to so many targets of a call are looked for one by one, which allocates
// nothing.
constexpr size_t kFewTargets = 16;
// Calls of up to so many requests and targets leave their arrays for the next.
constexpr size_t kKeptRequests = size_t{1} << 16;
constexpr size_t kKeptTargets = 1024;

// Arrays of one submission, kept for the next one of the thread.
struct Scratch {
    std::vector<SegmentID> ids;
    std::vector<Target> targets;
    std::vector<memfabric::Peer> peers;
    std::vector<memfabric::Request> requests;

    // Converts the requests and collects the ids of their targets.
    void convert(const std::vector<Request> &list);

    // Gives each request whose memory is not in the description that was read
    // again a peer that cannot be reached.
    [[gnu::cold, gnu::noinline]] void checkMemory(
        const std::vector<Request> &list);

    // Descriptions are not held beyond a call, nor is much memory.
    void clear();

   private:
    size_t find(SegmentID id, size_t guess);
    size_t findElsewhere(SegmentID id);

    // Of `ids`, once they are many; else empty.
    std::unordered_map<SegmentID, size_t> positions_;
};

void Scratch::convert(const std::vector<Request> &list) {
    ids.clear();
    if (!positions_.empty()) positions_.clear();
    requests.resize(list.size());
    if (list.empty()) return;
    auto *converted = requests.data();
    SegmentID id = list.front().target_id;
    ids.push_back(id);
    size_t target = 0;
    for (const auto &request : list) {
        if (request.target_id != id) {
            id = request.target_id;
            target = find(id, target);
        }
        *converted++ = {reinterpret_cast<size_t>(request.source),
                        request.target_offset, request.length,
                        static_cast<uint32_t>(target),
                        static_cast<uint8_t>(request.opcode)};
    }
}

// The position of an id, a new one if need be. It is first looked for behind
// the `guess`, for requests to several targets often take turns.
size_t Scratch::find(SegmentID id, size_t guess) {
    const size_t count = ids.size();
    if (++guess >= count) guess = 0;
    if (ids[guess] == id) return guess;
    return findElsewhere(id);
}

size_t Scratch::findElsewhere(SegmentID id) {
    const size_t count = ids.size();
    if (count <= kFewTargets) {
        size_t position = 0;
        while (position < count && ids[position] != id) ++position;
        if (position == count) ids.push_back(id);
        return position;
    }
    if (positions_.empty()) {
        for (size_t i = 0; i < count; ++i) positions_.emplace(ids[i], i);
    }
    const auto [found, added] = positions_.try_emplace(id, count);
    if (added) ids.push_back(id);
    return found->second;
}

void Scratch::checkMemory(const std::vector<Request> &list) {
    const BufferDesc *latest = nullptr;
    const Target *latest_target = nullptr;
    for (size_t i = 0; i < list.size(); ++i) {
        auto &target = targets[requests[i].peer];
        // One without bytes touches nothing.
        if (!target.read_again || target.peer.endpoint.empty() ||
            list[i].length == 0) {
            continue;
        }
        const uint64_t start = list[i].target_offset;
        const size_t length = list[i].length;
        // The search is linear, and most requests are to one buffer.
        const bool same = latest != nullptr && latest_target == &target &&
                          start >= latest->addr &&
                          start - latest->addr <= latest->length &&
                          length <= latest->length - (start - latest->addr);
        if (same) continue;
        if (const auto *buffer = target.pin->findBuffer(start, length)) {
            latest = buffer;
            latest_target = &target;
            continue;
        }
        if (target.without_memory == 0) {
            target.without_memory = static_cast<uint32_t>(peers.size());
            target.problem = rust::String::lossy(
                "segment " + std::to_string(target.id) + " " +
                Status::InvalidEntry(
                    "was described again and has no registered memory at " +
                    std::to_string(start) + ", " + std::to_string(length) +
                    " bytes, any more")
                    .ToString());
            peers.push_back({target.peer.name, {}, bytesOf(*target.problem)});
        }
        requests[i].peer = target.without_memory;
    }
}

void Scratch::clear() {
    targets.clear();
    if (requests.size() > kKeptRequests || ids.size() > kKeptTargets) {
        *this = {};
    }
}

// Other objects of a thread may submit when it ends, after its arrays are gone.
constinit thread_local bool arrays_gone = false;

struct ThreadArrays : Scratch {
    ~ThreadArrays() { arrays_gone = true; }
};

}  // namespace

// What an installed transport can reach.
enum class Reach : uint8_t { kNothing, kHosts, kDevices };

struct MemFabricTransport::Impl {
    rust::Box<memfabric::Transport> core = memfabric::newTransport();
    // The control service of the latest install, null if there is none. Any
    // thread may use what it once found here, without a lock.
    std::atomic<ControlService *> metadata{nullptr};
    std::atomic<Reach> reach{Reach::kNothing};
    // Too long for a string without memory of its own, and looked up in each
    // submission.
    const std::string endpoint_key = kEndpointKey;

    // One install or uninstall at a time.
    std::mutex lifecycle;
    // Keeps what `metadata` has pointed to, for readers may still be there.
    // Under `lifecycle`.
    std::vector<std::shared_ptr<ControlService>> services;

    [[nodiscard]] Status takeDown();
    [[nodiscard]] Status publish(SegmentManager &manager);
    [[nodiscard]] Status withdraw();
    [[nodiscard]] Status read(SegmentManager &manager, Target &target);
    void resolve(SegmentManager *manager, Target &target);
    // Apart, for nearly every peer does without them.
    [[gnu::cold, gnu::noinline]] void readAgain(SegmentManager &manager,
                                                Target &target);
    [[gnu::cold, gnu::noinline]] void giveUp(Target &target,
                                             const Status &status);

    // Null if the transport is not installed.
    SegmentManager *segments() const {
        auto *service = metadata.load(std::memory_order_acquire);
        return service ? &service->segmentManager() : nullptr;
    }
};

namespace {

[[nodiscard]] Status notInstalled() {
    return Status::InternalError("the memfabric transport is not installed");
}

}  // namespace

MemFabricTransport::MemFabricTransport() : impl_(std::make_unique<Impl>()) {}

MemFabricTransport::~MemFabricTransport() {
    if (impl_->core->isLeftAlone()) {
        // The library, its threads and the locks are the parent's.
        (void)impl_.release();
        return;
    }
    Status status = uninstall();
    // With work outstanding, the core says what it leaks when it goes.
    LOG_IF(WARNING, !status.ok())
        << "memfabric uninstall in destructor: " << status.message();
}

Status MemFabricTransport::install(std::string &local_segment_name,
                                   std::shared_ptr<ControlService> metadata,
                                   std::shared_ptr<Topology>,
                                   std::shared_ptr<Config> conf) {
    return guard("install", [&] {
        if (!metadata) {
            return Status::InvalidArgument(
                "memfabric install: metadata is null, must be the engine's "
                "control service");
        }
        memfabric::setLogSink(writeToGlog);
        const std::lock_guard lock(impl_->lifecycle);
        const auto local = metadata->segmentManager().getLocal();
        memfabric::Settings settings = settingsOf(conf.get());
        settings.rpc_server_addr = rust::String::lossy(local->rpc_server_addr);
        settings.local_segment_name = rust::String::lossy(local_segment_name);
        settings.log_level = FLAGS_minloglevel;
        CHECK_STATUS(toStatus(impl_->core->install(settings)));

        auto &services = impl_->services;
        if (std::find(services.begin(), services.end(), metadata) ==
            services.end()) {
            services.push_back(metadata);
        }
        impl_->metadata.store(metadata.get(), std::memory_order_release);
        Status published = guard("publish", [&] {
            return impl_->publish(metadata->segmentManager());
        });
        if (!published.ok()) {
            Status undone = impl_->takeDown();
            LOG_IF(WARNING, !undone.ok())
                << "memfabric undo of install: " << undone.message();
            return published;
        }
        impl_->reach.store(
            impl_->core->reachesDevices() ? Reach::kDevices : Reach::kHosts,
            std::memory_order_relaxed);
        return Status::OK();
    });
}

Status MemFabricTransport::uninstall() {
    return guard("uninstall", [this] {
        if (impl_->core->isLeftAlone()) return Status::OK();
        const std::lock_guard lock(impl_->lifecycle);
        return impl_->takeDown();
    });
}

const Capabilities MemFabricTransport::capabilities() const {
    const Reach reach = impl_->reach.load(std::memory_order_relaxed);
    Capabilities result{};
    result.dram_to_dram = reach != Reach::kNothing;
    result.dram_to_gpu = reach == Reach::kDevices;
    result.gpu_to_dram = reach == Reach::kDevices;
    result.gpu_to_gpu = reach == Reach::kDevices;
    return result;
}

Status MemFabricTransport::Impl::takeDown() {
    // A peer should stop finding us before we stop serving it; whether or not
    // that can be published, the library is taken down.
    Status withdrawn = guard("uninstall", [this] { return withdraw(); });
    CHECK_STATUS(
        guard("uninstall", [this] { return toStatus(core->uninstall()); }));
    reach.store(Reach::kNothing, std::memory_order_relaxed);
    metadata.store(nullptr, std::memory_order_release);
    return withdrawn;
}

Status MemFabricTransport::Impl::publish(SegmentManager &manager) {
    const std::string endpoint(core->endpoint());
    CHECK_STATUS(manager.updateLocal([&](SegmentDesc &desc) {
        deviceAttrs(desc)[kEndpointKey] = endpoint;
        return Status::OK();
    }));
    return manager.synchronizeLocal();
}

Status MemFabricTransport::Impl::withdraw() {
    auto *manager = segments();
    if (!manager) return Status::OK();
    if (!deviceAttrs(*manager->getLocal()).count(kEndpointKey)) {
        return Status::OK();
    }
    CHECK_STATUS(manager->updateLocal([](SegmentDesc &desc) {
        deviceAttrs(desc).erase(kEndpointKey);
        return Status::OK();
    }));
    return manager->synchronizeLocal();
}

Status MemFabricTransport::quiesce() {
    return guard("quiesce",
                 [this] { return toStatus(impl_->core->quiesce()); });
}

Status MemFabricTransport::warmupSegment(SegmentID target_id) {
    return guard("warmupSegment", [&] {
        auto *manager = impl_->segments();
        if (!manager) return notInstalled();
        Target target{target_id};
        return impl_->read(*manager, target);
    });
}

Status MemFabricTransport::allocateSubBatch(SubBatchRef &batch,
                                            size_t max_size) {
    return guard("allocateSubBatch", [&] {
        batch = new MemFabricSubBatch(*impl_->core, max_size);
        return Status::OK();
    });
}

Status MemFabricTransport::freeSubBatch(SubBatchRef &batch) {
    return guard("freeSubBatch", [&] {
        auto *ours = own(batch, *impl_->core);
        if (!ours) return notOurs("freeSubBatch");
        const std::unique_ptr<MemFabricSubBatch> owner(ours);
        batch = nullptr;
        impl_->core->release(std::move(owner->tasks));
        return Status::OK();
    });
}

Status MemFabricTransport::Impl::read(SegmentManager &manager, Target &target) {
    return manager.withCachedSegment(
        target.id, target.pin, [&](SegmentDesc *desc) {
            // May run twice, on two descriptions.
            target.peer.name = {};
            if (desc) target.peer.name = bytes(desc->name);
            if (!desc)
                return Status::InvalidEntry("segment has no description");
            if (desc->type != SegmentType::Memory) {
                return Status::InvalidArgument("is a file segment");
            }
            // Only read, and never with [], which would insert.
            const auto &attrs = deviceAttrs(*desc);
            const auto found = attrs.find(endpoint_key);
            if (found == attrs.end() || found->second.empty()) {
                Status missing = Status::InvalidEntry(
                    std::string("has no ") + kEndpointKey +
                    " in its metadata: memfabric is not enabled there");
                if (target.read_again || !core->mayReread(target.id)) {
                    return missing;
                }
                // TENT reads the description again and comes back.
                target.read_again = true;
                return Status::NeedsRefreshCache(missing.message());
            }
            target.peer.endpoint = bytes(found->second);
            return Status::OK();
        });
}

// What concerns one peer never fails the call: its tasks fail, and the engine
// tries them elsewhere.
void MemFabricTransport::Impl::resolve(SegmentManager *manager,
                                       Target &target) {
    const Status status = guard("resolve", [&] {
        return manager ? read(*manager, target) : notInstalled();
    });
    if (!status.ok()) {
        giveUp(target, status);
    } else if (target.id != LOCAL_SEGMENT_ID &&
               core->mustRefresh(target.id, target.peer.endpoint)) {
        readAgain(*manager, target);
    }
}

// Of a peer that may be gone: drops what this thread has cached about it.
void MemFabricTransport::Impl::readAgain(SegmentManager &manager,
                                         Target &target) {
    target.read_again = true;
    const Status status = guard("resolve", [&] {
        CHECK_STATUS(manager.invalidateRemote(target.id));
        return read(manager, target);
    });
    if (!status.ok()) giveUp(target, status);
}

void MemFabricTransport::Impl::giveUp(Target &target, const Status &status) {
    target.problem = rust::String::lossy(
        "segment " + std::to_string(target.id) + " " + status.ToString());
    target.peer.endpoint = {};
    target.peer.problem = bytesOf(*target.problem);
}

// For a thread that ends: what TENT has cached for it is gone as well.
Status MemFabricTransport::submitOnAnotherThread(
    SubBatchRef batch, const std::vector<Request> &request_list) {
    Status status = Status::OK();
    std::thread([&] {
        status = submitTransferTasks(batch, request_list);
    }).join();
    return status;
}

Status MemFabricTransport::submitTransferTasks(
    SubBatchRef batch, const std::vector<Request> &request_list) {
    return guard("submitTransferTasks", [&] {
        auto *ours = own(batch, *impl_->core);
        if (!ours) return notOurs("submitTransferTasks");
        if (arrays_gone) return submitOnAnotherThread(batch, request_list);
        thread_local ThreadArrays scratch;
        scratch.convert(request_list);
        scratch.peers.clear();
        scratch.targets.clear();
        auto *const manager = impl_->segments();
        bool read_again = false;
        for (const SegmentID id : scratch.ids) {
            auto &target = scratch.targets.emplace_back(id);
            impl_->resolve(manager, target);
            scratch.peers.push_back(target.peer);
            read_again |= target.read_again;
        }
        // The engine looked these requests up in the description from before.
        if (read_again) scratch.checkMemory(request_list);
        const auto outcome = impl_->core->submit(
            *ours->tasks, {scratch.peers.data(), scratch.peers.size()},
            {scratch.requests.data(), scratch.requests.size()});
        scratch.clear();
        return toStatus(outcome);
    });
}

Status MemFabricTransport::getTransferStatus(SubBatchRef batch, int task_id,
                                             TransferStatus &status) {
    auto *ours = own(batch, *impl_->core);
    if (!ours) return notOurs("getTransferStatus");
    if (const uint64_t *length = ours->completed(task_id)) {
        status = {TransferStatusEnum::COMPLETED, *length};
        return Status::OK();
    }
    return ours->poll(task_id, status);
}

bool MemFabricTransport::warmupMemory(void *addr, size_t) {
    return memfabric::deviceOf(reinterpret_cast<size_t>(addr)) >= 0;
}

Status MemFabricTransport::addMemoryBuffer(BufferDesc &desc,
                                           const MemoryOptions &options) {
    return guard("addMemoryBuffer", [&] {
        std::vector<BufferDesc> list{desc};
        CHECK_STATUS(addMemoryBuffer(list, options));
        desc = std::move(list.front());
        return Status::OK();
    });
}

Status MemFabricTransport::addMemoryBuffer(std::vector<BufferDesc> &desc_list,
                                           const MemoryOptions &) {
    return guard("addMemoryBuffer", [&] {
        std::vector<memfabric::Region> regions;
        for (const auto &desc : desc_list) regions.push_back(region(desc));
        CHECK_STATUS(toStatus(
            impl_->core->registerMemory({regions.data(), regions.size()})));
        const std::string endpoint(impl_->core->endpoint());
        // Uninstalled in between: the library has forgotten them.
        if (endpoint.empty()) return notInstalled();
        for (auto &desc : desc_list) {
            if (!desc.transport_attrs.count(MEMFABRIC)) {
                desc.transports.push_back(MEMFABRIC);
            }
            desc.transport_attrs[MEMFABRIC] = endpoint;
            // "*" means host memory to every peer.
            const int device =
                memfabric::deviceOf(static_cast<size_t>(desc.addr));
            if (desc.location == kWildcardLocation && device >= 0) {
                desc.location = "npu:" + std::to_string(device);
            }
        }
        return Status::OK();
    });
}

Status MemFabricTransport::removeMemoryBuffer(BufferDesc &desc) {
    return guard("removeMemoryBuffer", [&] {
        return toStatus(impl_->core->deregisterMemory(region(desc)));
    });
}

}  // namespace tent
}  // namespace mooncake
