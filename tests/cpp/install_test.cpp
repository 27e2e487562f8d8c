// SPDX-License-Identifier: Apache-2.0

// How an installation fails: status, text and what is left, for every row of
// the table in the documentation. Cases that depend on the environment or on
// the libraries run in a process of their own.

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>

#include "support/emulator.h"
#include "support/engine.h"
#include "support/process.h"

namespace memfabric_test {
namespace {

// Role: installs with the configuration given as JSON, prints the code, then
// the message.
const bool kInstallRole =
    addRole("install", [](const std::vector<std::string>& arguments) {
        Engine engine;
        Status loaded = engine.config->load(arguments.at(0));
        Status status = loaded.ok() ? engine.install() : loaded;
        std::printf("%d\n%s\n", static_cast<int>(status.code()),
                    std::string(status.message()).c_str());
        return 0;
    });

constexpr char kFiveProtocols[] =
    "device_sdma, device_rdma, host_rdma, device_urma, device_uboe";

struct Answer {
    Status::Code code;
    std::string message;
    std::string log;
};

Answer installInProcess(const std::string& config, Environment environment) {
    // Where no device is asked for, the emulated libascendcl.so does no harm.
    environment.emplace("LD_LIBRARY_PATH", MEMFABRIC_EMULATOR_DIR);
    environment.emplace("GLOG_logtostderr", "1");
    Process process("install", {config}, environment);
    const std::string code = process.readLine();
    const std::string message = process.readAll();
    EXPECT_EQ(process.wait(), 0) << process.log();
    return {static_cast<Status::Code>(std::atoi(code.c_str())), message,
            process.log()};
}

void expectText(const std::string& text,
                const std::vector<std::string>& parts) {
    for (const auto& part : parts) {
        EXPECT_NE(text.find(part), std::string::npos)
            << "no '" << part << "' in: " << text;
    }
}

constexpr char kHostRdma[] = R"({"transports/memfabric/protocol":"host_rdma"})";

TEST(InstallTest, SucceedsWithProtocolFromTheEnvironment) {
    const auto answer = installInProcess("{}", {{"MF_PROTOCOL", "host_rdma"}});
    EXPECT_EQ(answer.code, Status::Code::kOk) << answer.message;
}

TEST(InstallTest, LibraryNotFoundNamesItAndTheLinkersWords) {
    const auto answer = installInProcess(
        kHostRdma, {{"LD_LIBRARY_PATH", MEMFABRIC_NO_LIBRARY}});
    EXPECT_EQ(answer.code, Status::Code::kDeviceNotFound);
    expectText(answer.message,
               {"libmf_smem.so unavailable", "cannot open shared object file"});
}

TEST(InstallTest, MissingDependencyIsNamedNotTheLibrary) {
    const auto answer = installInProcess(
        kHostRdma, {{"LD_LIBRARY_PATH", MEMFABRIC_DEPENDENT_LIBRARY}});
    EXPECT_EQ(answer.code, Status::Code::kDeviceNotFound);
    expectText(answer.message,
               {"libmf_smem.so unavailable", "libmf_hybm_core.so"});
}

TEST(InstallTest, OlderLibraryNamesEveryMissingSymbolAndItsVersion) {
    const auto answer = installInProcess(
        kHostRdma, {{"LD_LIBRARY_PATH", MEMFABRIC_OLDER_LIBRARY}});
    EXPECT_EQ(answer.code, Status::Code::kDeviceNotFound);
    expectText(answer.message,
               {"smem_trans_get_rpc_port", "smem_trans_batch_copy",
                "smem_trans_batch_status_query", "1.3"});
    EXPECT_EQ(answer.message.find("smem_trans_init"), std::string::npos)
        << "named although it is there: " << answer.message;
    EXPECT_EQ(answer.log.find("function of the older library was called"),
              std::string::npos)
        << answer.log;
}

TEST(InstallTest, UnsetProtocolNamesTheVariableAndTheFiveValues) {
    const auto answer = installInProcess("{}", {{"MF_PROTOCOL", ""}});
    EXPECT_EQ(answer.code, Status::Code::kInvalidArgument);
    expectText(answer.message, {"MF_PROTOCOL must be set", kFiveProtocols});
}

TEST(InstallTest, UnknownProtocolNamesTheValueAndTheFive) {
    for (const char* value :
         {"sdma", "Device_RDMA", "device_rdma ", "device_rdma,host_rdma"}) {
        const auto answer = installInProcess("{}", {{"MF_PROTOCOL", value}});
        EXPECT_EQ(answer.code, Status::Code::kInvalidArgument);
        expectText(answer.message, {"MF_PROTOCOL", value, kFiveProtocols});
    }
}

TEST(InstallTest, UnusableTimeoutIsAWarningAndTheDefault) {
    for (const char* value :
         {"abc", " 500", "500ms", "-1", "0", "1e3", "99999999999999999999"}) {
        const auto answer =
            installInProcess(kHostRdma, {{"MF_TRANSFER_TIMEOUT", value}});
        EXPECT_EQ(answer.code, Status::Code::kOk) << answer.message;
        expectText(answer.log, {"MF_TRANSFER_TIMEOUT", value, "10000"});
    }
}

TEST(InstallTest, DeviceProtocolWithoutCurrentDeviceNamesTheCallAndTheMend) {
    const auto answer =
        installInProcess("{}", {{"MF_PROTOCOL", "device_rdma"},
                                {"MF_EMULATOR_DEVICE", "code:107002"}});
    EXPECT_EQ(answer.code, Status::Code::kInternalError);
    expectText(answer.message, {"aclrtGetDevice", "107002", "aclrtSetDevice"});
}

TEST(InstallTest, DeviceProtocolUsesTheCurrentDevice) {
    const auto answer = installInProcess(
        "{}", {{"MF_PROTOCOL", "device_sdma"}, {"MF_EMULATOR_DEVICE", "3"}});
    EXPECT_EQ(answer.code, Status::Code::kOk) << answer.message;
}

// A folder with the emulated libmf_smem.so and no libascendcl.so.
class WithoutAscend {
   public:
    WithoutAscend() {
        std::string pattern =
            std::filesystem::temp_directory_path() / "memfabric-test-XXXXXX";
        folder_ = mkdtemp(pattern.data());
        std::filesystem::create_symlink(
            std::filesystem::path(MEMFABRIC_EMULATOR_DIR) / "libmf_smem.so",
            folder_ / "libmf_smem.so");
    }
    ~WithoutAscend() {
        std::error_code ignored;
        std::filesystem::remove_all(folder_, ignored);
    }
    std::string folder() const { return folder_; }

   private:
    std::filesystem::path folder_;
};

TEST(InstallTest, DeviceProtocolWithoutCannNamesItsLibrary) {
    WithoutAscend without;
    const auto answer =
        installInProcess("{}", {{"MF_PROTOCOL", "device_rdma"},
                                {"LD_LIBRARY_PATH", without.folder()}});
    EXPECT_EQ(answer.code, Status::Code::kDeviceNotFound);
    expectText(answer.message, {"libascendcl.so", "device_rdma", "host_rdma"});
}

TEST(InstallTest, HostRdmaNeedsNoCann) {
    WithoutAscend without;
    const auto answer =
        installInProcess(kHostRdma, {{"LD_LIBRARY_PATH", without.folder()}});
    EXPECT_EQ(answer.code, Status::Code::kOk) << answer.message;
}

TEST(InstallTest, UnusableNeedRetryCodeNamesKeyAndValue) {
    for (const char* value : {"0", "2147483648", "\"one\"", "1.5", "true"}) {
        Engine engine;
        ASSERT_TRUE(engine.config
                        ->load(std::string(R"({"transports":{"memfabric":{)"
                                           R"("protocol":"host_rdma",)"
                                           R"("need_retry_code":)") +
                               value + "}}}")
                        .ok());
        const Status status = engine.install();
        EXPECT_TRUE(status.IsInvalidArgument()) << value << ": " << status;
        std::string bare = value;
        std::erase(bare, '"');
        expectText(std::string(status.message()),
                   {"transports/memfabric/need_retry_code", bare});
    }
}

TEST(InstallTest, UnknownProtocolInTheConfigurationNamesTheKey) {
    for (const char* value : {"\"rdma\"", "7", "[]"}) {
        Engine engine;
        ASSERT_TRUE(engine.config
                        ->load(std::string(R"({"transports":{"memfabric":{)"
                                           R"("protocol":)") +
                               value + "}}}")
                        .ok());
        const Status status = engine.install();
        EXPECT_TRUE(status.IsInvalidArgument()) << value << ": " << status;
        expectText(std::string(status.message()),
                   {"transports/memfabric/protocol", kFiveProtocols});
    }
}

// Settings of the published library, each with one value that the core refuses:
// the key that it names is the one that reached it. The library itself is never
// opened.
TEST(InstallTest, EachKeyOfThePublishedLibraryReachesTheCore) {
    const std::string whole =
        R"("protocol":"host_tcp","abi":"v1","role":"sender",)"
        R"("store_url":"tcp://127.0.0.1:12000")";
    struct Case {
        // Keys that come after those above, and win over them.
        const char* keys;
        const char* text;
    };
    for (const auto& [keys, text] : {
             Case{R"("abi":"v2")", "transports/memfabric/abi is 'v2', must be"},
             Case{R"("abi":1)", "transports/memfabric/abi is 1, must be"},
             Case{R"("store_url":"tcp://localhost:1")",
                  "transports/memfabric/store_url is 'tcp://localhost:1'"},
             Case{R"("store_host":1)", "transports/memfabric/store_host is 1"},
             Case{R"("role":"both")", "transports/memfabric/role is 'both'"},
             Case{R"("nic":"eth0")", "transports/memfabric/nic is 'eth0'"},
             Case{R"("visibility_patience_ms":10001)",
                  "transports/memfabric/visibility_patience_ms is 10001"},
         }) {
        SCOPED_TRACE(keys);
        const auto answer = installInProcess(
            R"({"transports":{"memfabric":{)" + whole + "," + keys + "}}}", {});
        EXPECT_EQ(answer.code, Status::Code::kInvalidArgument);
        expectText(answer.message, {text});
    }
}

TEST(InstallTest, PublishedLibraryNeedsItsStoreAndItsRole) {
    auto answer = installInProcess(
        R"({"transports":{"memfabric":{"protocol":"host_tcp","abi":"v1"}}})",
        {});
    EXPECT_EQ(answer.code, Status::Code::kInvalidArgument);
    expectText(answer.message, {"MF_CONFIG_STORE_URL must be set",
                                "transports/memfabric/store_url"});
    answer = installInProcess(
        R"({"transports/memfabric/protocol":"host_tcp"})",
        {{"MF_ABI", "v1"}, {"MF_CONFIG_STORE_URL", "tcp://127.0.0.1:12000"}});
    EXPECT_EQ(answer.code, Status::Code::kInvalidArgument);
    expectText(answer.message,
               {"MF_ROLE must be set", "transports/memfabric/role"});
}

TEST(InstallTest, LibraryWithAsynchronousBatchesIsNotThePublishedOne) {
    const auto answer =
        installInProcess(R"({"transports":{"memfabric":{)"
                         R"("protocol":"host_tcp","abi":"v1","role":"sender",)"
                         R"("store_url":"tcp://127.0.0.1:12000"}}})",
                         {});
    EXPECT_EQ(answer.code, Status::Code::kDeviceNotFound);
    expectText(answer.message, {"smem_trans_batch_write", "MF_ABI"});
}

TEST(InstallTest, HostTcpWithoutThePublishedLibraryNamesTheSettingForIt) {
    const auto answer = installInProcess("{}", {{"MF_PROTOCOL", "host_tcp"}});
    EXPECT_EQ(answer.code, Status::Code::kInvalidArgument);
    expectText(answer.message,
               {"MF_PROTOCOL is 'host_tcp'", "MF_ABI=v1", kFiveProtocols});
}

// One step of the installation that the library refuses.
struct Refusal {
    const char* script;
    Status::Code code;
    std::vector<std::string> text;
    // Calls that undo the steps before it.
    uint64_t destroyed;
};

TEST(InstallTest, EachRefusedStepIsNamedAndUndoneOnceAndASecondInstallWorks) {
    const std::vector<Refusal> refusals = {
        {"init=SM_INVALID_PARAM",
         Status::Code::kInternalError,
         {"smem_trans_init", "SM_INVALID_PARAM (-2000)"},
         0},
        {"config_init=SM_ERROR",
         Status::Code::kInternalError,
         {"smem_trans_config_init", "SM_ERROR (-1)"},
         0},
        {"create=null",
         Status::Code::kDeviceNotFound,
         {"smem_trans_create", "127.0.0.1:0"},
         0},
        {"get_rpc_port=SM_INNER_BUSY",
         Status::Code::kInternalError,
         {"smem_trans_get_rpc_port", "SM_INNER_BUSY (-2013)"},
         1},
        {"port=0",
         Status::Code::kInternalError,
         {"smem_trans_get_rpc_port", "0"},
         1},
    };
    auto& emulator = Emulator::get();
    for (const auto& refusal : refusals) {
        SCOPED_TRACE(refusal.script);
        emulator.reset();
        emulator.script(refusal.script);
        Engine engine;
        const Status status = engine.install();
        EXPECT_EQ(status.code(), refusal.code) << status;
        expectText(std::string(status.message()), refusal.text);
        EXPECT_EQ(engine.endpoint(), "(none)") << "advertised nevertheless";
        EXPECT_EQ(emulator.count("destroy"), refusal.destroyed);
        EXPECT_EQ(emulator.count("uninit"), 0u);
        EXPECT_EQ(emulator.count("handles"), 0u);
        const auto capabilities = engine.transport().capabilities();
        EXPECT_FALSE(capabilities.dram_to_dram || capabilities.gpu_to_gpu);

        emulator.script("");
        const Status again = engine.install();
        EXPECT_TRUE(again.ok()) << again;
        EXPECT_NE(engine.endpoint(), "(none)");
        EXPECT_TRUE(engine.transport().uninstall().ok());
        EXPECT_TRUE(emulator.violations().empty())
            << emulator.violations().front();
    }
}

TEST(InstallTest, LibraryAlreadyInitialisedByAnotherCopyIsSuccess) {
    auto& emulator = Emulator::get();
    emulator.reset();
    emulator.script("init=SM_REPEAT_CALL");
    Engine engine;
    EXPECT_TRUE(engine.install().ok());
    EXPECT_TRUE(engine.transport().uninstall().ok());
    EXPECT_EQ(emulator.count("uninit"), 0u)
        << "uninitialised what another copy initialised";
}

TEST(InstallTest, SecondInstallIsInvalidArgumentAndChangesNothing) {
    Emulator::get().reset();
    Engine engine;
    engine.installed();
    const std::string endpoint = engine.endpoint();
    const Status status = engine.install();
    EXPECT_TRUE(status.IsInvalidArgument()) << status;
    expectText(std::string(status.message()), {"already installed", endpoint});
    EXPECT_EQ(engine.endpoint(), endpoint);
    EXPECT_EQ(Emulator::get().count("create"), 1u);
    EXPECT_TRUE(engine.transport().uninstall().ok());
}

TEST(InstallTest, WithoutMetadataIsInvalidArgument) {
    Engine engine;
    std::string segment_name = engine.name;
    const Status status = engine.transport().install(segment_name, nullptr,
                                                     nullptr, engine.config);
    EXPECT_TRUE(status.IsInvalidArgument()) << status;
}

TEST(InstallTest, WithoutConfigurationTheProtocolIsMissingAndNothingElse) {
    Engine engine;
    std::string segment_name = engine.name;
    const Status status =
        engine.transport().install(segment_name, engine.metadata, nullptr);
    EXPECT_TRUE(status.IsInvalidArgument()) << status;
    expectText(std::string(status.message()), {"MF_PROTOCOL must be set"});
}

TEST(InstallTest, UnusableLocalAddressNamesItAndAdvertisesNothing) {
    for (const char* address :
         {"[2001::db8::1]:9", ":12345", "[fe80::1%eth0]:9"}) {
        Engine engine;
        ASSERT_TRUE(engine.segments()
                        .updateLocal([&](SegmentDesc& segment) {
                            segment.rpc_server_addr = address;
                            return Status::OK();
                        })
                        .ok());
        const Status status = engine.install();
        EXPECT_TRUE(status.IsInvalidArgument()) << address << ": " << status;
        expectText(std::string(status.message()), {address});
        EXPECT_EQ(engine.endpoint(), "(none)");
    }
}

TEST(InstallTest, PortOfTheEndpointIsTheLibrarysAndUrlAsksForAFreeOne) {
    auto& emulator = Emulator::get();
    emulator.reset();
    emulator.script("log; port=45123");
    Engine engine;
    engine.installed();
    EXPECT_EQ(engine.endpoint(), "127.0.0.1:45123");
    const auto calls = emulator.calls("smem_trans_create");
    ASSERT_EQ(calls.size(), 1u);
    EXPECT_EQ(field(calls[0], "url"), "\"127.0.0.1:0\"") << calls[0];
}

TEST(InstallTest, Ipv6EndpointKeepsItsBrackets) {
    Emulator::get().reset();
    std::unique_ptr<Engine> engine;
    try {
        engine = std::make_unique<Engine>(true);
    } catch (const std::exception& error) {
        GTEST_SKIP() << "::1 is not available here: " << error.what();
    }
    const Status status = engine->install();
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_TRUE(engine->endpoint().starts_with("[::1]:")) << engine->endpoint();
    EXPECT_EQ(engine->endpoint().find(']'), engine->endpoint().rfind(']'));
    EXPECT_TRUE(engine->transport().uninstall().ok());
}

}  // namespace
}  // namespace memfabric_test
