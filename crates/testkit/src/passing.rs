//! Devices of tests that stand before another one.

/// Those methods of a device that it passes on to the one in its field `$inner`.
///
/// ```text
/// impl Device for Failing {
///     device_passes_on!(inner: name, len_bytes, read_at, flush, discard, resize, is_read_only);
///     fn write_at(&self, …) …
/// }
/// ```
#[macro_export]
macro_rules! device_passes_on {
    ($inner:ident: $($method:ident),*) => {
        $($crate::device_passes_on!(@ $method $inner);)*
    };
    (@ name $inner:ident) => {
        fn name(&self) -> String {
            self.$inner.name()
        }
    };
    (@ len_bytes $inner:ident) => {
        fn len_bytes(&self) -> u64 {
            self.$inner.len_bytes()
        }
    };
    (@ read_at $inner:ident) => {
        fn read_at(&self, at: $crate::PhysicalAddr, buf: &mut [u8]) -> std::io::Result<()> {
            self.$inner.read_at(at, buf)
        }
    };
    (@ write_at $inner:ident) => {
        fn write_at(&self, at: $crate::PhysicalAddr, buf: &[u8]) -> std::io::Result<()> {
            self.$inner.write_at(at, buf)
        }
    };
    (@ flush $inner:ident) => {
        fn flush(&self) -> std::io::Result<()> {
            self.$inner.flush()
        }
    };
    (@ discard $inner:ident) => {
        fn discard(&self, at: $crate::PhysicalAddr, len_bytes: u64) -> std::io::Result<()> {
            self.$inner.discard(at, len_bytes)
        }
    };
    (@ resize $inner:ident) => {
        fn resize(&self, len_bytes: u64) -> std::io::Result<()> {
            self.$inner.resize(len_bytes)
        }
    };
    (@ is_read_only $inner:ident) => {
        fn is_read_only(&self) -> bool {
            self.$inner.is_read_only()
        }
    };
}
