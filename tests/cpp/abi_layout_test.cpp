// SPDX-License-Identifier: Apache-2.0

// The vendor library's structures once more in C++: a second opinion on the
// layouts that the Rust core asserts in src/vendor/abi.rs.

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>

namespace {

enum smem_trans_role_t { ROLE_NONE, ROLE_SENDER, ROLE_RECEIVER, ROLE_BOTH };
enum smem_trans_opcode_t { OPCODE_READ, OPCODE_WRITE };
enum smem_bm_data_op_type { DATA_OP_SDMA = 1 << 0, DATA_OP_UBOE = 1 << 7 };

struct smem_tls_config {
    bool tlsEnable;
    char caPath[256];
    char crlPath[256];
    char certPath[256];
    char keyPath[256];
    char keyPassPath[256];
    char packagePath[256];
    char decrypterLibPath[256];
};

struct smem_trans_config_t {
    smem_trans_role_t role;
    uint32_t initTimeout;
    uint32_t deviceId;
    uint32_t flags;
    smem_bm_data_op_type dataOpType;
    char nic[64];
    char url[64];
    smem_tls_config tlsConfig;
};

struct smem_trans_batch_params_t {
    const char* destUrl;
    void** srcList;
    void** destList;
    size_t* sizeList;
    uint32_t batchSize;
    smem_trans_opcode_t opcode;
    void* stream;
    uint32_t flags;
};

static_assert(sizeof(smem_trans_role_t) == 4, "passed as a 32-bit number");
static_assert(sizeof(smem_trans_opcode_t) == 4, "passed as a 32-bit number");
static_assert(sizeof(smem_bm_data_op_type) == 4, "passed as a 32-bit number");

static_assert(sizeof(smem_tls_config) == 1793);
static_assert(alignof(smem_tls_config) == 1);
static_assert(offsetof(smem_tls_config, caPath) == 1);
static_assert(offsetof(smem_tls_config, decrypterLibPath) == 1537);

static_assert(sizeof(smem_trans_config_t) == 1944);
static_assert(alignof(smem_trans_config_t) == 4);
static_assert(offsetof(smem_trans_config_t, initTimeout) == 4);
static_assert(offsetof(smem_trans_config_t, deviceId) == 8);
static_assert(offsetof(smem_trans_config_t, flags) == 12);
static_assert(offsetof(smem_trans_config_t, dataOpType) == 16);
static_assert(offsetof(smem_trans_config_t, nic) == 20);
static_assert(offsetof(smem_trans_config_t, url) == 84);
static_assert(offsetof(smem_trans_config_t, tlsConfig) == 148);

static_assert(sizeof(smem_trans_batch_params_t) == 56);
static_assert(alignof(smem_trans_batch_params_t) == 8);
static_assert(offsetof(smem_trans_batch_params_t, srcList) == 8);
static_assert(offsetof(smem_trans_batch_params_t, destList) == 16);
static_assert(offsetof(smem_trans_batch_params_t, sizeList) == 24);
static_assert(offsetof(smem_trans_batch_params_t, batchSize) == 32);
static_assert(offsetof(smem_trans_batch_params_t, opcode) == 36);
static_assert(offsetof(smem_trans_batch_params_t, stream) == 40);
static_assert(offsetof(smem_trans_batch_params_t, flags) == 48);

TEST(AbiLayoutTest, StructuresHaveTheSizesThatTheLibraryExpects) {
    // The assertions above are the test; this says in a report that they ran.
    EXPECT_EQ(sizeof(smem_trans_config_t), 1944u);
    EXPECT_EQ(sizeof(smem_trans_batch_params_t), 56u);
}

}  // namespace
