#include "tls.hpp"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>
#include <vector>

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

// What a reader without TLS gets from a server with it, since OpenSSL does not answer what is no TLS at all: a fatal alert,
// protocol_version. TcpClient knows it.
constexpr uint8_t kSpeakTls[] = {21, 3, 3, 0, 2, 2, 70};

class TlsStream final : public Stream {
  public:
    TlsStream(Fd fd, Side side, std::shared_ptr<const Context> context, std::shared_ptr<Counts> counts, uint64_t rekey_records);
    ~TlsStream() override;

    Io handshake() override;
    Moved readv(const iovec* parts, size_t count) override;
    Moved writev(const iovec* parts, size_t count) override;
    bool computes() const override { return true; }
    std::string reason() const override { return reason_; }

  private:
    static int receive(Bio* bio, char* into, int bytes);
    static int collect(Bio* bio, const char* from, int bytes);
    static long control(Bio* bio, int command, long, void*);
    static openssl::BioMethod* method();

    Io flush();
    bool encrypt(const uint8_t* from, size_t bytes);
    size_t encrypt_parts(const iovec* parts, size_t count);
    Io pause(int result);
    void explain();
    void close(std::atomic<uint64_t> Counts::* counter, std::string reason);

    const openssl::Library& lib_;
    const std::shared_ptr<const Context> context_;
    const std::shared_ptr<Counts> counts_;
    const Side side_;
    const uint64_t rekey_records_;
    openssl::Ssl* ssl_ = nullptr;

    std::vector<uint8_t> outgoing_;  // ciphertext, at most kOutgoingBytes
    size_t sent_ = 0;                // of it
    size_t accepted_ = 0;            // plaintext of outgoing_ that no `writev` has counted
    uint64_t key_records_ = 0;       // encrypted under the present key
    size_t idle_bytes_ = 0;          // received since the handshake, less twice the data that came of it
    bool secured_ = false;           // the handshake is done
    bool ended_ = false;             // the peer closed, or the socket failed
    int error_ = 0;                  // errno of the socket's failure
    std::string reason_;             // not empty: CLOSED
};

TlsStream::TlsStream(Fd fd, Side side, std::shared_ptr<const Context> context, std::shared_ptr<Counts> counts, uint64_t rekey_records)
    : Stream(std::move(fd)),
      lib_(openssl::library()),
      context_(std::move(context)),
      counts_(counts != nullptr ? std::move(counts) : std::make_shared<Counts>()),
      side_(side),
      rekey_records_(rekey_records) {
    outgoing_.reserve(kOutgoingBytes);  // `collect` is called by C, which no exception may cross
    ssl_ = lib_.SSL_new(context_->get());
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

TlsStream::~TlsStream() {
    if (!secured_ && reason_.empty()) ++counts_->unfinished;
    lib_.SSL_free(ssl_);
}

// The end of OpenSSL that faces the socket. Reading goes straight to it; writing collects, so that many records cost one
// send, and `send` can say MSG_NOSIGNAL.
openssl::BioMethod* TlsStream::method() {
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

int TlsStream::receive(Bio* bio, char* into, int bytes) {
    const openssl::Library& lib = openssl::library();
    auto* const self = static_cast<TlsStream*>(lib.BIO_get_data(bio));
    lib.BIO_clear_flags(bio, openssl::kRead | openssl::kWrite | openssl::kShouldRetry);
    while (self->idle_bytes_ <= kIdleBytes) {
        const ssize_t got = recv(self->fd(), into, static_cast<size_t>(bytes), 0);
        if (got > 0) {
            if (self->secured_) self->idle_bytes_ += static_cast<size_t>(got);
            return static_cast<int>(got);
        }
        if (got < 0 && errno == EINTR) continue;
        if (got < 0 && would_block(errno)) {
            lib.BIO_set_flags(bio, openssl::kRead | openssl::kShouldRetry);
            return -1;
        }
        self->ended_ = true;
        self->error_ = got < 0 ? errno : 0;
        return got < 0 ? -1 : 0;
    }
    return -1;
}

int TlsStream::collect(Bio* bio, const char* from, int bytes) {
    const openssl::Library& lib = openssl::library();
    auto* const self = static_cast<TlsStream*>(lib.BIO_get_data(bio));
    lib.BIO_clear_flags(bio, openssl::kRead | openssl::kWrite | openssl::kShouldRetry);
    if (self->outgoing_.size() + static_cast<size_t>(bytes) > kOutgoingBytes) {  // a peer that asks for answers and takes none
        lib.BIO_set_flags(bio, openssl::kWrite | openssl::kShouldRetry);
        return -1;
    }
    const auto* data = reinterpret_cast<const uint8_t*>(from);
    self->outgoing_.insert(self->outgoing_.end(), data, data + bytes);
    return bytes;
}

long TlsStream::control(Bio* bio, int command, long, void*) {
    if (command == openssl::kBioFlush) return 1;
    if (command == openssl::kBioEof) return static_cast<TlsStream*>(openssl::library().BIO_get_data(bio))->ended_ ? 1 : 0;
    return 0;
}

// MOVED: nothing is left to send.
Io TlsStream::flush() {
    while (sent_ < outgoing_.size()) {
        const ssize_t n = send(fd(), outgoing_.data() + sent_, outgoing_.size() - sent_, MSG_NOSIGNAL);
        if (n >= 0) {
            sent_ += static_cast<size_t>(n);
        } else if (would_block(errno)) {
            return Io::WANT_WRITE;
        } else if (errno != EINTR) {
            close(nullptr, "connection lost: " + error_text(errno));
            return Io::CLOSED;
        }
    }
    outgoing_.clear();
    sent_ = 0;
    return Io::MOVED;
}

Io TlsStream::handshake() {
    if (!reason_.empty()) return Io::CLOSED;
    lib_.ERR_clear_error();
    const int result = lib_.SSL_do_handshake(ssl_);
    const Io io = result == 1 ? Io::MOVED : pause(result);
    const Io flushed = flush();  // when the handshake failed: the alert that tells the peer why
    if (io == Io::CLOSED) return io;
    if (flushed != Io::MOVED) return flushed;
    if (io == Io::MOVED && !std::exchange(secured_, true)) ++counts_->done;
    return io;
}

Moved TlsStream::readv(const iovec* parts, size_t count) {
    if (!reason_.empty()) return {Io::CLOSED, 0};
    lib_.ERR_clear_error();
    size_t total = 0;
    for (size_t i = 0; i < count; ++i) {
        auto* const at = static_cast<uint8_t*>(parts[i].iov_base);
        for (size_t done = 0; done < parts[i].iov_len;) {
            size_t got = 0;
            const int result = lib_.SSL_read_ex(ssl_, at + done, parts[i].iov_len - done, &got);
            if (result != 1) {
                const Io io = pause(result);
                flush();  // what OpenSSL answers by itself; the rest of it can wait for the next call
                return {total != 0 ? Io::MOVED : io, total};
            }
            done += got;
            total += got;
            idle_bytes_ -= std::min(idle_bytes_, 2 * got);
        }
    }
    return {Io::MOVED, total};
}

Moved TlsStream::writev(const iovec* parts, size_t count) {
    Io flushed = flush();
    if (flushed != Io::MOVED) return {flushed, 0};
    if (accepted_ == 0) {
        lib_.ERR_clear_error();
        accepted_ = encrypt_parts(parts, count);
        if (!reason_.empty()) return {Io::CLOSED, 0};
        flushed = flush();
    }
    if (flushed != Io::MOVED) return {flushed, 0};
    return {Io::MOVED, std::exchange(accepted_, 0)};
}

// Into outgoing_, at most kChunkBytes of plaintext. Small parts share a record, large ones are encrypted where they lie.
size_t TlsStream::encrypt_parts(const iovec* parts, size_t count) {
    std::array<uint8_t, kRecordBytes> gathered;
    size_t filled = 0;  // of gathered
    size_t taken = 0;
    for (size_t i = 0; i < count && taken < kChunkBytes; ++i) {
        const auto* at = static_cast<const uint8_t*>(parts[i].iov_base);
        size_t left = std::min(parts[i].iov_len, kChunkBytes - taken);
        taken += left;
        while (left != 0) {
            const bool whole = filled == 0 && left >= kRecordBytes;
            const size_t part = whole ? left / kRecordBytes * kRecordBytes : std::min(left, kRecordBytes - filled);
            if (whole) {
                if (!encrypt(at, part)) return 0;
            } else {
                std::memcpy(gathered.data() + filled, at, part);
                filled += part;
            }
            at += part;
            left -= part;
            if (filled == kRecordBytes && !encrypt(gathered.data(), std::exchange(filled, 0))) return 0;
        }
    }
    return filled == 0 || encrypt(gathered.data(), filled) ? taken : 0;
}

// Into outgoing_, which has room.
bool TlsStream::encrypt(const uint8_t* from, size_t bytes) {
    if (key_records_ >= rekey_records_) {
        if (lib_.SSL_key_update(ssl_, openssl::kKeyUpdateNotRequested) != 1) return explain(), false;
        key_records_ = 0;  // the update goes out before the next record
    }
    key_records_ += (bytes + kRecordBytes - 1) / kRecordBytes;
    while (bytes != 0) {
        size_t written = 0;
        const int result = lib_.SSL_write_ex(ssl_, from, bytes, &written);
        if (result != 1) return explain(), false;
        from += written;
        bytes -= written;
    }
    return true;
}

// What to do after a call that returned `result`.
Io TlsStream::pause(int result) {
    const int error = lib_.SSL_get_error(ssl_, result);
    if (error == openssl::kWantRead) return Io::WANT_READ;
    if (error == openssl::kWantWrite) return Io::WANT_WRITE;
    explain();
    return Io::CLOSED;
}

void TlsStream::explain() {
    const unsigned long error = lib_.ERR_peek_last_error();
    const int reason = openssl::error_library(error) == openssl::kLibSsl ? openssl::error_reason(error) : 0;
    if (idle_bytes_ > kIdleBytes) return close(&Counts::broken, "the peer sends TLS records with hardly any data in them");
    if (ended_ && error_ != 0) return close(nullptr, "connection lost: " + error_text(error_));
    if (ended_ || error == 0) return close(nullptr, "closed by the peer");
    if (reason > openssl::kAlerts) return close(&Counts::refused_us, alert_text(reason - openssl::kAlerts));
    switch (reason) {
        case openssl::kNoCertificate: return close(&Counts::no_certificate, "the peer shows no certificate");
        case openssl::kVerifyFailed:
            return close(&Counts::untrusted, std::string("the peer's certificate is refused: ") +
                                                 lib_.X509_verify_cert_error_string(lib_.SSL_get_verify_result(ssl_)));
        case openssl::kWrongVersion:
            if (side_ == Side::SERVER && outgoing_.empty()) outgoing_.assign(std::begin(kSpeakTls), std::end(kSpeakTls));
            return close(&Counts::not_tls, "the peer does not speak TLS on its tcp plane");
        case openssl::kUnsupportedProtocol: return close(&Counts::not_tls, "the peer offers an older TLS; both sides need 1.3");
        default: break;
    }
    const char* const text = lib_.ERR_reason_error_string(error);
    close(&Counts::broken, std::string("TLS failed: ") + (text != nullptr ? text : "unknown error"));
}

// The first reason counts: what follows is its consequence. Without a counter it counts as `unfinished`, if it is.
void TlsStream::close(std::atomic<uint64_t> Counts::* counter, std::string reason) {
    if (!reason_.empty()) return;
    reason_ = std::move(reason);
    if (counter == nullptr && !secured_) counter = &Counts::unfinished;
    if (counter != nullptr) ++((*counts_).*counter);
}

}  // namespace

std::unique_ptr<Stream> tls_stream(Fd fd, Side side, std::shared_ptr<const Context> context, std::shared_ptr<Counts> counts,
                                   uint64_t rekey_records) {
    return std::make_unique<TlsStream>(std::move(fd), side, std::move(context), std::move(counts), rekey_records);
}

MakeStream make_tls(Side side, std::shared_ptr<Credentials> credentials, std::shared_ptr<Counts> counts) {
    return [side, credentials = std::move(credentials), counts = std::move(counts)](Fd fd) {
        return tls_stream(std::move(fd), side, credentials->current(), counts);
    };
}

}  // namespace kvdir::tls
