#include "tls.hpp"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "net.hpp"

namespace kvdir::tls {

using openssl::Bio;

namespace {

// More than OpenSSL needs for answers of its own (alerts, key updates) beside what `write` lets in.
constexpr size_t kOutgoingBytes = 2 * kChunkBytes;

// What the peer's fatal alert says about us (RFC 8446, 6.2).
std::string alert_text(int alert) {
    switch (alert) {
        case 42: case 43: case 46: return "the peer refuses our certificate";
        case 44: return "the peer refuses our certificate: it is revoked";
        case 45: return "the peer refuses our certificate: it has expired";
        case 48: return "the peer refuses our certificate: its data_tls_ca is not the CA that signed ours";
        case 70: return "the peer offers another version of TLS; both sides need 1.3";
        case 116: return "the peer asks for a certificate and we showed none";
        default: return "the peer ended the TLS handshake with alert " + std::to_string(alert);
    }
}

bool would_block(int error) { return error == EAGAIN || error == EWOULDBLOCK; }

}  // namespace

Session::Session(std::shared_ptr<const Context> context, Side side, int fd, uint64_t rekey_bytes)
    : lib_(openssl::library()), context_(std::move(context)), fd_(fd), rekey_bytes_(rekey_bytes), ssl_(lib_.SSL_new(context_->get())) {
    Bio* const bio = ssl_ == nullptr ? nullptr : lib_.BIO_new(method());
    if (bio == nullptr) {
        lib_.SSL_free(ssl_);
        throw std::bad_alloc();
    }
    lib_.BIO_set_data(bio, this);
    lib_.BIO_set_init(bio, 1);
    lib_.SSL_set_bio(ssl_, bio, bio);
    side == Side::CLIENT ? lib_.SSL_set_connect_state(ssl_) : lib_.SSL_set_accept_state(ssl_);
}

Session::~Session() { lib_.SSL_free(ssl_); }

// The end of OpenSSL that faces the socket. Reading goes straight to it; writing collects, so that many records cost one
// send, and `send` can say MSG_NOSIGNAL.
openssl::BioMethod* Session::method() {
    static openssl::BioMethod* const made = [] {
        const openssl::Library& lib = openssl::library();
        openssl::BioMethod* const fresh = lib.BIO_meth_new(lib.BIO_get_new_index() | openssl::kSourceSink, "kvdir socket");
        if (fresh == nullptr) throw std::bad_alloc();
        lib.BIO_meth_set_read(fresh, receive);
        lib.BIO_meth_set_write(fresh, collect);
        lib.BIO_meth_set_ctrl(fresh, control);
        return fresh;
    }();
    return made;
}

int Session::receive(Bio* bio, char* into, int bytes) {
    const openssl::Library& lib = openssl::library();
    auto* const self = static_cast<Session*>(lib.BIO_get_data(bio));
    lib.BIO_clear_flags(bio, openssl::kRead | openssl::kWrite | openssl::kShouldRetry);
    while (true) {
        const ssize_t got = recv(self->fd_, into, static_cast<size_t>(bytes), 0);
        if (got > 0) return static_cast<int>(got);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0 && would_block(errno)) {
            lib.BIO_set_flags(bio, openssl::kRead | openssl::kShouldRetry);
            return -1;
        }
        self->ended_ = true;
        self->error_ = got < 0 ? errno : 0;
        return got < 0 ? -1 : 0;
    }
}

int Session::collect(Bio* bio, const char* from, int bytes) {
    const openssl::Library& lib = openssl::library();
    auto* const self = static_cast<Session*>(lib.BIO_get_data(bio));
    lib.BIO_clear_flags(bio, openssl::kRead | openssl::kWrite | openssl::kShouldRetry);
    if (self->outgoing_.size() + static_cast<size_t>(bytes) > kOutgoingBytes) {  // a peer that asks for answers and takes none
        lib.BIO_set_flags(bio, openssl::kWrite | openssl::kShouldRetry);
        return -1;
    }
    const auto* data = reinterpret_cast<const uint8_t*>(from);
    self->outgoing_.insert(self->outgoing_.end(), data, data + bytes);
    return bytes;
}

long Session::control(Bio* bio, int command, long, void*) {
    if (command == openssl::kBioFlush) return 1;
    if (command == openssl::kBioEof) return static_cast<Session*>(openssl::library().BIO_get_data(bio))->ended_ ? 1 : 0;
    return 0;
}

// True: nothing is left to send.
bool Session::flush(Pause* why) {
    while (sent_ < outgoing_.size()) {
        const ssize_t n = send(fd_, outgoing_.data() + sent_, outgoing_.size() - sent_, MSG_NOSIGNAL);
        if (n >= 0) {
            sent_ += static_cast<size_t>(n);
        } else if (would_block(errno)) {
            *why = Pause::WANT_WRITE;
            return false;
        } else if (errno != EINTR) {
            *why = Pause::CLOSED;
            close(Refusal::NONE, "connection lost: " + error_text(errno));
            return false;
        }
    }
    outgoing_.clear();
    sent_ = 0;
    return true;
}

bool Session::handshake(Pause* why) {
    lib_.ERR_clear_error();
    const int result = lib_.SSL_do_handshake(ssl_);
    if (result != 1 && failed(result, why)) {
        Pause ignored;
        flush(&ignored);  // the alert: it tells the peer why
        return false;
    }
    return flush(why) && result == 1;
}

size_t Session::read(const iovec* parts, size_t count, Pause* why) {
    size_t total = 0;
    if (!outgoing_.empty() && !flush(why) && *why == Pause::CLOSED) return 0;
    lib_.ERR_clear_error();
    for (size_t i = 0; i < count; ++i) {
        auto* const at = static_cast<uint8_t*>(parts[i].iov_base);
        for (size_t done = 0; done < parts[i].iov_len;) {
            size_t got = 0;
            const int result = lib_.SSL_read_ex(ssl_, at + done, parts[i].iov_len - done, &got);
            if (result != 1) {
                failed(result, why);
                return total;
            }
            done += got;
            total += got;
        }
    }
    return total;
}

size_t Session::write(const iovec* parts, size_t count, Pause* why) {
    if (!flush(why)) return 0;
    if (accepted_ != 0) return std::exchange(accepted_, 0);
    lib_.ERR_clear_error();
    std::array<uint8_t, kRecordBytes> gathered;
    size_t filled = 0;  // of gathered
    size_t taken = 0;
    for (size_t i = 0; i < count && taken < kChunkBytes; ++i) {
        const auto* at = static_cast<const uint8_t*>(parts[i].iov_base);
        size_t left = std::min(parts[i].iov_len, kChunkBytes - taken);
        taken += left;
        while (left != 0) {
            const bool whole = filled == 0 && left >= kRecordBytes;  // no need to copy it together
            const size_t part = whole ? left / kRecordBytes * kRecordBytes : std::min(left, kRecordBytes - filled);
            if (!whole) std::memcpy(gathered.data() + filled, at, part);
            filled += whole ? 0 : part;
            at += part;
            left -= part;
            if (whole && !encrypt(at - part, part)) return *why = Pause::CLOSED, 0;
            if (filled < kRecordBytes) continue;
            if (!encrypt(gathered.data(), filled)) return *why = Pause::CLOSED, 0;
            filled = 0;
        }
    }
    if (filled != 0 && !encrypt(gathered.data(), filled)) return *why = Pause::CLOSED, 0;
    accepted_ = taken;
    return flush(why) ? std::exchange(accepted_, 0) : 0;
}

// Into outgoing_, which has room.
bool Session::encrypt(const uint8_t* from, size_t bytes) {
    if (key_bytes_ >= rekey_bytes_) {
        if (lib_.SSL_key_update(ssl_, openssl::kKeyUpdateNotRequested) != 1) return explain(), false;
        key_bytes_ = 0;  // the update goes out before the next record
    }
    key_bytes_ += bytes;
    while (bytes != 0) {
        size_t written = 0;
        const int result = lib_.SSL_write_ex(ssl_, from, bytes, &written);
        if (result != 1) return explain(), false;
        from += written;
        bytes -= written;
    }
    return true;
}

bool Session::has_pending() const { return lib_.SSL_has_pending(ssl_) == 1; }

// After a call that returned `result`: true if the session is over.
bool Session::failed(int result, Pause* why) {
    const int error = lib_.SSL_get_error(ssl_, result);
    const bool over = error != openssl::kWantRead && error != openssl::kWantWrite;
    if (over) explain();
    *why = over ? Pause::CLOSED : error == openssl::kWantRead ? Pause::WANT_READ : Pause::WANT_WRITE;
    return over;
}

void Session::explain() {
    const unsigned long error = lib_.ERR_peek_last_error();
    const int reason = openssl::error_library(error) == openssl::kLibSsl ? openssl::error_reason(error) : 0;
    if (ended_ && error_ != 0) return close(Refusal::NONE, "connection lost: " + error_text(error_));
    if (ended_ || error == 0) return close(Refusal::NONE, "the peer closed the connection");
    if (reason > openssl::kAlerts) return close(Refusal::BY_PEER, alert_text(reason - openssl::kAlerts));
    if (reason == openssl::kNoCertificate) return close(Refusal::NO_CERTIFICATE, "the peer shows no certificate");
    if (reason == openssl::kVerifyFailed)
        return close(Refusal::UNTRUSTED, std::string("the peer's certificate is refused: ") +
                                             lib_.X509_verify_cert_error_string(lib_.SSL_get_verify_result(ssl_)));
    if (reason == openssl::kWrongVersion)
        return close(Refusal::NOT_TLS, "the peer does not speak TLS on its tcp plane");
    if (reason == openssl::kUnsupportedProtocol)
        return close(Refusal::NOT_TLS, "the peer offers an older TLS; both sides need 1.3");
    const char* const text = lib_.ERR_reason_error_string(error);
    close(Refusal::BROKEN, std::string("TLS failed: ") + (text != nullptr ? text : "unknown error"));
}

// The first reason counts: what follows is its consequence.
void Session::close(Refusal refusal, std::string reason) {
    if (!reason_.empty()) return;
    refusal_ = refusal;
    reason_ = std::move(reason);
}

}  // namespace kvdir::tls
