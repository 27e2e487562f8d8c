// SPDX-License-Identifier: Apache-2.0

#include "tent/runtime/control_plane.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <thread>

#include "metadata_socket.h"

namespace {

using mooncake::tent::Status;

class Socket {
   public:
    explicit Socket(int fd) : fd_(fd) {}
    ~Socket() {
        if (fd_ >= 0) close(fd_);
    }
    Socket(const Socket&) = delete;
    Socket& operator=(const Socket&) = delete;
    int fd() const { return fd_; }

   private:
    int fd_;
};

// An address of either family.
struct Address {
    sockaddr_storage storage{};
    socklen_t length = 0;

    sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
};

Address loopback(bool ipv6, uint16_t port) {
    Address address;
    if (ipv6) {
        sockaddr_in6 in6{};
        in6.sin6_family = AF_INET6;
        in6.sin6_addr = in6addr_loopback;
        in6.sin6_port = htons(port);
        std::memcpy(&address.storage, &in6, sizeof(in6));
        address.length = sizeof(in6);
    } else {
        sockaddr_in in{};
        in.sin_family = AF_INET;
        in.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        in.sin_port = htons(port);
        std::memcpy(&address.storage, &in, sizeof(in));
        address.length = sizeof(in);
    }
    return address;
}

Status failed(const std::string& what) {
    return Status::RpcServiceError(what + ": " + std::strerror(errno));
}

}  // namespace

namespace tent_double {

Status ask(const std::string& address, std::string& text) {
    bool ipv6 = address.starts_with("[::1]:");
    if (!ipv6 && !address.starts_with("127.0.0.1:")) {
        return Status::RpcServiceError("only the loopback is reached, not " +
                                       address);
    }
    auto port =
        std::strtoul(address.c_str() + address.rfind(':') + 1, nullptr, 10);
    Address peer = loopback(ipv6, static_cast<uint16_t>(port));
    Socket socket(
        ::socket(peer.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (socket.fd() < 0) return failed("socket");
    if (connect(socket.fd(), peer.get(), peer.length) != 0) {
        return failed("connect to " + address);
    }
    text.clear();
    char buffer[4096];
    ssize_t length;
    while ((length = read(socket.fd(), buffer, sizeof(buffer))) > 0) {
        text.append(buffer, static_cast<size_t>(length));
    }
    return length == 0 ? Status::OK() : failed("read from " + address);
}

}  // namespace tent_double

namespace mooncake {
namespace tent {

// Answers every connection with the current description.
class ControlService::Server {
   public:
    Server(SegmentManager& manager, bool ipv6)
        : manager_(manager),
          socket_(::socket(ipv6 ? AF_INET6 : AF_INET,
                           SOCK_STREAM | SOCK_CLOEXEC, 0)) {}

    ~Server() {
        // Ends accept(), for good.
        shutdown(socket_.fd(), SHUT_RDWR);
        if (thread_.joinable()) thread_.join();
    }

    Status start(uint16_t& port, bool ipv6) {
        Address address = loopback(ipv6, port);
        if (socket_.fd() < 0) return failed("socket");
        if (bind(socket_.fd(), address.get(), address.length) != 0 ||
            listen(socket_.fd(), SOMAXCONN) != 0 ||
            getsockname(socket_.fd(), address.get(), &address.length) != 0) {
            return failed("bind to port " + std::to_string(port));
        }
        port = ntohs(
            ipv6 ? reinterpret_cast<sockaddr_in6*>(address.get())->sin6_port
                 : reinterpret_cast<sockaddr_in*>(address.get())->sin_port);
        thread_ = std::thread([this] { serve(); });
        return Status::OK();
    }

   private:
    void serve() {
        for (;;) {
            int fd = accept4(socket_.fd(), nullptr, nullptr, SOCK_CLOEXEC);
            if (fd < 0) {
                if (errno == EINTR || errno == ECONNABORTED) continue;
                return;
            }
            Socket peer(fd);
            try {
                answer(fd, *manager_.getLocalDumpedJson());
            } catch (const std::exception&) {
                // The peer gets nothing, which it takes for "not found".
            }
        }
    }

    static void answer(int fd, const std::string& text) {
        for (size_t sent = 0; sent < text.size();) {
            ssize_t length =
                send(fd, text.data() + sent, text.size() - sent, MSG_NOSIGNAL);
            if (length <= 0) return;
            sent += static_cast<size_t>(length);
        }
    }

    SegmentManager& manager_;
    Socket socket_;
    std::thread thread_;
};

ControlService::ControlService(const std::string& type,
                               const std::string& servers,
                               TransferEngineImpl* impl)
    : manager_(std::make_unique<SegmentManager>()) {
    if (type != "p2p" || !servers.empty() || impl != nullptr) {
        throw std::logic_error("this double knows p2p, and no engine");
    }
}

ControlService::~ControlService() = default;

Status ControlService::start(uint16_t& port, bool ipv6, size_t /*threads*/) {
    if (server_) return Status::InvalidArgument("already started");
    auto server = std::make_unique<Server>(*manager_, ipv6);
    CHECK_STATUS(server->start(port, ipv6));
    server_ = std::move(server);
    return Status::OK();
}

}  // namespace tent
}  // namespace mooncake
