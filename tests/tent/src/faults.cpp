// SPDX-License-Identifier: Apache-2.0

#include "tent_double/faults.h"

#include <array>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

namespace tent_double {

namespace {

struct Fault {
    uint64_t at = 0;  // in calls; 0: always
    std::exception_ptr exception;
    Status status;
};

struct Point {
    uint64_t calls = 0;
    std::optional<Fault> fault;
};

constexpr size_t kCalls = static_cast<size_t>(Call::kCount);

std::mutex mutex;
std::array<Point, kCalls> points;

Point& pointOf(Call call) { return points.at(static_cast<size_t>(call)); }

bool answersStatus(Call call) {
    return call != Call::kConfigGet && call != Call::kGetLocal &&
           call != Call::kGetLocation;
}

void arm(Call call, Fault fault) {
    if (!fault.exception && !answersStatus(call)) {
        throw std::logic_error(std::string(nameOf(call)) +
                               " answers no Status; use throwAt");
    }
    std::lock_guard<std::mutex> lock(mutex);
    auto& point = pointOf(call);
    if (fault.at != 0) fault.at += point.calls;
    point.fault = std::move(fault);
}

}  // namespace

const char* nameOf(Call call) {
    constexpr std::array<const char*, kCalls> kNames = {
        "Config::get",          "getLocal",
        "updateLocal",          "synchronizeLocal",
        "getRemoteCached",      "withCachedSegment",
        "invalidateRemote",     "invalidateAllCacheForRemote",
        "Platform::allocate",   "Platform::copy",
        "Platform::getLocation"};
    return kNames.at(static_cast<size_t>(call));
}

void throwAt(Call call, uint64_t n, std::exception_ptr exception) {
    arm(call, {n, std::move(exception), Status::OK()});
}

void failAt(Call call, uint64_t n, Status status) {
    arm(call, {n, nullptr, std::move(status)});
}

void failAlways(Call call, Status status) {
    arm(call, {0, nullptr, std::move(status)});
}

uint64_t count(Call call) {
    std::lock_guard<std::mutex> lock(mutex);
    return pointOf(call).calls;
}

void reset() {
    std::lock_guard<std::mutex> lock(mutex);
    points = {};
}

Status pass(Call call) {
    std::exception_ptr exception;
    {
        std::lock_guard<std::mutex> lock(mutex);
        auto& point = pointOf(call);
        ++point.calls;
        auto& fault = point.fault;
        if (!fault || (fault->at != 0 && fault->at != point.calls)) {
            return Status::OK();
        }
        if (!fault->exception) return fault->status;
        exception = fault->exception;
    }
    std::rethrow_exception(exception);
}

void passOrThrow(Call call) { (void)pass(call); }

}  // namespace tent_double
