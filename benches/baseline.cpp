// SPDX-License-Identifier: Apache-2.0

#include "baseline.h"

#include "null_smem.h"

namespace memfabric_bench {

using namespace mooncake::tent;  // NOLINT: every line here is about TENT

namespace {

// As the shim's core has them, so that neither side calls more directly.
struct Library {
    decltype(&smem_trans_batch_copy) copy = smem_trans_batch_copy;
    decltype(&smem_trans_batch_status_query) query =
        smem_trans_batch_status_query;
    smem_trans_t handle = nullptr;
};

// The argument arrays of one vendor batch.
struct Arrays {
    explicit Arrays(size_t room)
        : local(new void *[room]),
          remote(new void *[room]),
          lengths(new size_t[room]) {}

    void set(size_t index, const Request &request) {
        local[index] = request.source;
        remote[index] = reinterpret_cast<void *>(request.target_offset);
        lengths[index] = request.length;
    }

    void submit(const Library &library, const std::string &peer, size_t count,
                Request::OpCode opcode) {
        params = {peer.c_str(),
                  local.get(),
                  remote.get(),
                  lengths.get(),
                  static_cast<uint32_t>(count),
                  static_cast<uint32_t>(opcode),
                  nullptr,
                  0};
        library.copy(library.handle, &params, &id);
    }

    void ask(const Library &library) const {
        int32_t result = 0;
        library.query(library.handle, id, &result, 0);
    }

    std::unique_ptr<void *[]> local;
    std::unique_ptr<void *[]> remote;
    std::unique_ptr<size_t[]> lengths;
    smem_trans_batch_params_t params{};
    uint64_t id = 0;
};

// Sub-batches of one capacity, recycled.
template <typename Batch>
class Baseline : public Transport {
   public:
    explicit Baseline(const std::vector<std::string> &endpoints)
        : endpoints_(endpoints) {}

    Status allocateSubBatch(SubBatchRef &batch, size_t max_size) override {
        if (kept_.empty()) {
            batch = new Batch(max_size, endpoints_.size());
            return Status::OK();
        }
        batch = kept_.back().release();
        kept_.pop_back();
        return Status::OK();
    }

    Status freeSubBatch(SubBatchRef &batch) override {
        kept_.emplace_back(static_cast<Batch *>(batch));
        batch = nullptr;
        return Status::OK();
    }

    Status submitTransferTasks(SubBatchRef batch,
                               const std::vector<Request> &requests) override {
        auto *ours = static_cast<Batch *>(batch);
        ours->submit(library_, endpoints_, requests);
        ours->result = PENDING;
        return Status::OK();
    }

    Status getTransferStatus(SubBatchRef batch, int task_id,
                             TransferStatus &status) override {
        auto *ours = static_cast<Batch *>(batch);
        if (ours->result == PENDING) {
            ours->ask(library_);
            ours->result = COMPLETED;
        }
        status.s = ours->result;
        status.transferred_bytes = ours->length(task_id);
        return Status::OK();
    }

   private:
    Library library_;
    std::vector<std::string> endpoints_;
    std::vector<std::unique_ptr<Batch>> kept_;
};

// One peer, one opcode: the requests are the vendor batch.
struct OneGroup : public Transport::SubBatch {
    OneGroup(size_t room, size_t /*peers*/) : arrays(room) {}

    size_t size() const override { return count; }

    void submit(const Library &library,
                const std::vector<std::string> &endpoints,
                const std::vector<Request> &requests) {
        count = requests.size();
        for (size_t i = 0; i < count; ++i) arrays.set(i, requests[i]);
        arrays.submit(library, endpoints.front(), count,
                      requests.front().opcode);
    }

    void ask(const Library &library) const { arrays.ask(library); }

    size_t length(int task_id) const { return arrays.lengths[task_id]; }

    Arrays arrays;
    size_t count = 0;
    TransferStatusEnum result = PENDING;
};

// A vendor batch for each peer and opcode, and the length of each task.
struct Groups : public Transport::SubBatch {
    Groups(size_t room, size_t peers) : lengths(new size_t[room]) {
        for (size_t i = 0; i < 2 * peers; ++i) groups.emplace_back(room);
    }

    size_t size() const override { return count; }

    void submit(const Library &library,
                const std::vector<std::string> &endpoints,
                const std::vector<Request> &requests) {
        count = requests.size();
        for (auto &group : groups) group.count = 0;
        for (size_t i = 0; i < count; ++i) {
            const auto &request = requests[i];
            auto &group = groups[(request.target_id - 1) * 2 + request.opcode];
            group.set(group.count++, request);
            lengths[i] = request.length;
        }
        for (size_t i = 0; i < groups.size(); ++i) {
            if (groups[i].count == 0) continue;
            groups[i].submit(library, endpoints[i / 2], groups[i].count,
                             static_cast<Request::OpCode>(i % 2));
        }
    }

    void ask(const Library &library) const {
        for (const auto &group : groups) {
            if (group.count != 0) group.ask(library);
        }
    }

    size_t length(int task_id) const { return lengths[task_id]; }

    struct Group : public Arrays {
        using Arrays::Arrays;
        size_t count = 0;
    };

    std::vector<Group> groups;
    std::unique_ptr<size_t[]> lengths;
    size_t count = 0;
    TransferStatusEnum result = PENDING;
};

}  // namespace

std::unique_ptr<Transport> makeBaseline(
    const std::vector<std::string> &endpoints, bool one_opcode) {
    if (endpoints.size() == 1 && one_opcode) {
        return std::make_unique<Baseline<OneGroup>>(endpoints);
    }
    return std::make_unique<Baseline<Groups>>(endpoints);
}

}  // namespace memfabric_bench
