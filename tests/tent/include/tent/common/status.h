// SPDX-License-Identifier: Apache-2.0

// Double of TENT's Status: the same codes, factories and questions.

#ifndef TENT_STATUS_H
#define TENT_STATUS_H

#include <cstdint>
#include <ostream>
#include <string>
#include <string_view>

#define TENT_DOUBLE_TEXT_(x) #x
#define TENT_DOUBLE_TEXT(x) TENT_DOUBLE_TEXT_(x)
#define LOC_MARK "\n    Raised at " __FILE__ ":" TENT_DOUBLE_TEXT(__LINE__)

#define CHECK_STATUS(call)               \
    do {                                 \
        Status status = call;            \
        if (!status.ok()) return status; \
    } while (0)

// One row a code, in the order of the numbers.
#define TENT_DOUBLE_STATUS_CODES(row)                                     \
    row(InvalidArgument, 1) row(TooManyRequests, 2)                       \
        row(AddressNotRegistered, 3) row(DeviceNotFound, 4)               \
            row(InvalidEntry, 5) row(InvalidMetadataType, 6)              \
                row(NeedsRefreshCache, 7) row(RdmaError, 100)             \
                    row(CudaError, 101) row(MetadataError, 131)           \
                        row(RpcServiceError, 132) row(MalformedJson, 133) \
                            row(InternalError, 199) row(NotImplemented, 200)

namespace mooncake {
namespace tent {

class Status final {
   public:
    enum class Code : uint16_t {
        kOk = 0,
#define TENT_DOUBLE_CODE(name, number) k##name = number,
        TENT_DOUBLE_STATUS_CODES(TENT_DOUBLE_CODE)
#undef TENT_DOUBLE_CODE
            kMaxCode
    };

    Status() = default;
    // The message of success is dropped.
    Status(Code code, std::string_view message)
        : code_(code), message_(code == Code::kOk ? "" : message) {}

    Code code() const { return code_; }
    std::string_view message() const { return message_; }
    [[nodiscard]] bool ok() const { return code_ == Code::kOk; }
    bool operator==(const Status&) const = default;

    static Status OK() { return Status(); }

#define TENT_DOUBLE_FACTORY(name, number)                                  \
    [[nodiscard]] bool Is##name() const { return code_ == Code::k##name; } \
    static Status name(std::string_view message) {                         \
        return Status(Code::k##name, message);                             \
    }
    TENT_DOUBLE_STATUS_CODES(TENT_DOUBLE_FACTORY)
#undef TENT_DOUBLE_FACTORY

    std::string ToString() const {
        if (ok()) return "OK";
        return std::string(CodeToString(code_)) + ": " + message_;
    }

    static std::string_view CodeToString(Code code) {
        switch (code) {
            case Code::kOk:
                return "OK";
#define TENT_DOUBLE_NAME(name, number) \
    case Code::k##name:                \
        return #name;
                TENT_DOUBLE_STATUS_CODES(TENT_DOUBLE_NAME)
#undef TENT_DOUBLE_NAME
            case Code::kMaxCode:
                break;
        }
        return "UnknownCode";
    }

   private:
    Code code_ = Code::kOk;
    std::string message_;
};

inline std::ostream& operator<<(std::ostream& os, Status::Code code) {
    return os << Status::CodeToString(code);
}

inline std::ostream& operator<<(std::ostream& os, const Status& status) {
    return os << status.ToString();
}

}  // namespace tent
}  // namespace mooncake

#endif  // TENT_STATUS_H
