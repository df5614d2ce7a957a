// The few functions of OpenSSL 3 that tls.cpp needs, declared here and found at run time: nothing to install for a build, and
// no dependency for who runs without TLS.
//
// Types and constants are those of OpenSSL's public headers (ssl.h, bio.h, x509_vfy.h of 3.0; 3.x keeps their ABI).
#pragma once

#include <cstddef>
#include <ctime>

namespace kvdir::openssl {

struct SslMethod;
struct SslContext;
struct Ssl;
struct Bio;
struct BioMethod;
struct Certificate;
struct Chain;
struct Store;
struct StoreContext;
struct Time;

using PasswordCallback = int(char* into, int size, int writing, void* data);

// Return values: 1 is success where OpenSSL's manual says so; pointers are null on failure.
#define KVDIR_LIBSSL_FUNCTIONS(F)                                                                        \
    F(const SslMethod*, TLS_method, ())                                                                  \
    F(SslContext*, SSL_CTX_new, (const SslMethod*))                                                      \
    F(void, SSL_CTX_free, (SslContext*))                                                                 \
    F(long, SSL_CTX_ctrl, (SslContext*, int, long, void*))                                               \
    F(int, SSL_CTX_set_ciphersuites, (SslContext*, const char*))                                         \
    F(int, SSL_CTX_set_num_tickets, (SslContext*, size_t))                                               \
    F(void, SSL_CTX_set_default_read_buffer_len, (SslContext*, size_t))                                  \
    F(void, SSL_CTX_set_default_passwd_cb, (SslContext*, PasswordCallback*))                             \
    F(void, SSL_CTX_set_verify, (SslContext*, int, void*))                                               \
    F(int, SSL_CTX_use_certificate_chain_file, (SslContext*, const char*))                               \
    F(int, SSL_CTX_use_PrivateKey_file, (SslContext*, const char*, int))                                 \
    F(int, SSL_CTX_check_private_key, (const SslContext*))                                               \
    F(int, SSL_CTX_load_verify_locations, (SslContext*, const char*, const char*))                       \
    F(Certificate*, SSL_CTX_get0_certificate, (const SslContext*))                                       \
    F(Store*, SSL_CTX_get_cert_store, (const SslContext*))                                               \
    F(Ssl*, SSL_new, (SslContext*))                                                                      \
    F(void, SSL_free, (Ssl*))                                                                            \
    F(void, SSL_set_bio, (Ssl*, Bio*, Bio*))                                                             \
    F(void, SSL_set_connect_state, (Ssl*))                                                               \
    F(void, SSL_set_accept_state, (Ssl*))                                                                \
    F(int, SSL_do_handshake, (Ssl*))                                                                     \
    F(int, SSL_read_ex, (Ssl*, void*, size_t, size_t*))                                                  \
    F(int, SSL_write_ex, (Ssl*, const void*, size_t, size_t*))                                           \
    F(int, SSL_key_update, (Ssl*, int))                                                                  \
    F(int, SSL_get_error, (const Ssl*, int))                                                             \
    F(long, SSL_get_verify_result, (const Ssl*))

#define KVDIR_LIBCRYPTO_FUNCTIONS(F)                                                                     \
    F(unsigned long, OpenSSL_version_num, ())                                                            \
    F(int, BIO_get_new_index, ())                                                                        \
    F(BioMethod*, BIO_meth_new, (int, const char*))                                                      \
    F(int, BIO_meth_set_read, (BioMethod*, int (*)(Bio*, char*, int)))                                   \
    F(int, BIO_meth_set_write, (BioMethod*, int (*)(Bio*, const char*, int)))                            \
    F(int, BIO_meth_set_ctrl, (BioMethod*, long (*)(Bio*, int, long, void*)))                            \
    F(Bio*, BIO_new, (const BioMethod*))                                                                 \
    F(void, BIO_set_data, (Bio*, void*))                                                                 \
    F(void*, BIO_get_data, (Bio*))                                                                       \
    F(void, BIO_set_init, (Bio*, int))                                                                   \
    F(void, BIO_set_flags, (Bio*, int))                                                                  \
    F(void, BIO_clear_flags, (Bio*, int))                                                                \
    F(void, ERR_clear_error, ())                                                                         \
    F(unsigned long, ERR_peek_last_error, ())                                                            \
    F(const char*, ERR_reason_error_string, (unsigned long))                                             \
    F(const Time*, X509_get0_notAfter, (const Certificate*))                                             \
    F(int, ASN1_TIME_to_tm, (const Time*, std::tm*))                                                     \
    F(StoreContext*, X509_STORE_CTX_new, ())                                                             \
    F(void, X509_STORE_CTX_free, (StoreContext*))                                                        \
    F(int, X509_STORE_CTX_init, (StoreContext*, Store*, Certificate*, Chain*))                           \
    F(int, X509_STORE_CTX_set_purpose, (StoreContext*, int))                                             \
    F(int, X509_STORE_CTX_get_error, (const StoreContext*))                                              \
    F(int, X509_verify_cert, (StoreContext*))                                                            \
    F(const char*, X509_verify_cert_error_string, (long))

struct Library {
#define KVDIR_MEMBER(result, name, parameters) result(*name) parameters = nullptr;
    KVDIR_LIBSSL_FUNCTIONS(KVDIR_MEMBER)
    KVDIR_LIBCRYPTO_FUNCTIONS(KVDIR_MEMBER)
#undef KVDIR_MEMBER
};

constexpr const char* kSslName = "libssl.so.3";
constexpr const char* kCryptoName = "libcrypto.so.3";

// Throws std::runtime_error: not installed (with what to install), or too old.
Library load(const char* ssl_name, const char* crypto_name);

// The machine's library, loaded on first use and never unloaded. Throws what `load` throws, each time it is asked.
const Library& library();

// ssl.h
constexpr int kSetMode = 33, kSetReadAhead = 41, kSetSessionCache = 44, kGetChain = 115, kSetMinVersion = 123;
constexpr long kModePartialWrite = 1, kModeMovingBuffer = 2, kModeReleaseBuffers = 16;
constexpr long kTls13 = 0x0304;
constexpr int kVerifyBoth = 1 | 2;  // VERIFY_PEER | FAIL_IF_NO_PEER_CERT
constexpr int kPem = 1;
constexpr int kWantRead = 2, kWantWrite = 3;
constexpr int kKeyUpdateNotRequested = 0;
// bio.h
constexpr int kSourceSink = 0x0400;
constexpr int kRead = 1, kWrite = 2, kShouldRetry = 8;
constexpr int kBioEof = 2, kBioFlush = 11;
// x509v3.h
constexpr int kPurposeClient = 1, kPurposeServer = 2;
// sslerr.h. Alerts of the peer are 1000 + their number (RFC 8446, 6).
constexpr unsigned long kLibSsl = 20;
constexpr int kNoCertificate = 199, kVerifyFailed = 134, kUnsupportedProtocol = 258, kWrongVersion = 267, kAlerts = 1000;

inline unsigned long error_library(unsigned long error) { return error >> 23 & 0xFF; }
inline int error_reason(unsigned long error) { return static_cast<int>(error & 0x7FFFFF); }

}  // namespace kvdir::openssl
