"""Compares the stand-in headers with Apple's SDK metadata, and checks that the checker finds deliberate mistakes."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

from softmetal.apple import api_check, api_metadata, wheels

# Methods that are not in PyObjC's metadata of the SDK, because Python needs no description of their types. Our
# declarations of these methods follow Apple's documentation.
UNVERIFIED = {
    f"{kind}[{owner} {selector}]"
    for owner, kind, selectors in (
        ("NSAutoreleasePool", "+", ["addObject:"]),
        ("NSAutoreleasePool", "-", ["drain"]),
        ("NSError", "+", ["errorWithDomain:code:userInfo:"]),
        ("NSError", "-", ["code", "domain", "localizedDescription"]),
        ("NSProcessInfo", "+", ["processInfo"]),
        ("NSProcessInfo", "-", ["operatingSystemVersion"]),
        ("NSMutableDictionary", "+", ["dictionary"]),
        ("NSMutableDictionary", "-", ["setObject:forKey:", "setObject:forKeyedSubscript:"]),
        ("NSDictionary", "-", ["allKeys", "objectForKey:", "objectForKeyedSubscript:"]),
        ("NSArray", "-", ["objectAtIndex:", "objectAtIndexedSubscript:"]),
        ("NSNumber", "+", ["numberWithInt:", "numberWithUnsignedInt:", "numberWithLong:", "numberWithUnsignedLong:"]),
        ("NSNumber", "+", ["numberWithLongLong:", "numberWithFloat:", "numberWithDouble:"]),
        ("NSNumber", "-", ["doubleValue", "longLongValue", "stringValue"]),
        ("NSObject", "+", ["alloc", "class", "new"]),
        ("NSObject", "-", ["dealloc", "init"]),
        ("MTLCompileOptions", "-", ["languageVersion", "mathFloatingPointFunctions", "mathMode", "preprocessorMacros"]),
        ("MTLCompileOptions", "-", ["setLanguageVersion:", "setMathFloatingPointFunctions:", "setMathMode:"]),
        ("MTLCompileOptions", "-", ["setPreprocessorMacros:"]),
        ("MTLFunctionConstantValues", "-", ["setConstantValue:type:atIndex:", "setConstantValue:type:withName:"]),
        ("MTLCommandBuffer", "-", ["status"]),  # the metadata has this selector only for MTLIOCommandBuffer
    )
    for selector in selectors
}


@pytest.fixture(scope="module")
def apple() -> api_metadata.Metadata:
    try:
        return api_metadata.load()
    except wheels.WheelUnavailable as error:
        pytest.skip(f"Apple's SDK metadata: {error}")


@pytest.fixture
def headers(tmp_path: Path) -> Path:
    return Path(shutil.copytree(api_check.INCLUDE, tmp_path / "include"))


def spoil(headers: Path, before: str, after: str) -> api_check.Declarations:
    """Reads the declarations of the headers after one deliberate mistake in Metal.h."""
    path = headers / "Metal" / "Metal.h"
    text = path.read_text()
    assert text.count(before) == 1, f"{before!r} is there {text.count(before)} times"
    path.write_text(text.replace(before, after))
    return api_check.declarations(headers)


def test_headers_agree_with_apples_metadata(apple: api_metadata.Metadata) -> None:
    declared = api_check.declarations()
    report = api_check.check_declarations(declared, apple)
    assert report.problems == []
    assert report.unverified == UNVERIFIED
    methods = sum(len(protocol.methods) for protocol in declared.protocols.values())
    assert methods - len(report.unverified) > 80
    assert len(declared.enums) > 50


def test_metadata_is_really_read(apple: api_metadata.Metadata) -> None:
    """Checks the metadata against known facts about the SDK, without our headers."""
    set_bytes = apple.protocols["MTLComputeCommandEncoder"].methods["setBytes:length:atIndex:", False]
    assert set_bytes.types == "v40@0:8r^v16Q24Q32"
    assert apple.protocols["MTLComputeCommandEncoder"].adopts == ["MTLCommandEncoder"]
    assert apple.enums["MTLLanguageVersion3_1"] == 0x30001
    assert "MTLLibraryErrorDomain" in apple.constants


@pytest.mark.parametrize(
    ("before", "after", "report"),
    [
        (
            "setThreadgroupMemoryLength:(NSUInteger)length atIndex:",
            "setThreadgroupMemoryLength:(NSUInteger)length index:",
            "-[MTLComputeCommandEncoder setThreadgroupMemoryLength:index:]: Apple's MTLComputeCommandEncoder has no",
        ),
        (
            "setBytes:(const void*)bytes length:(NSUInteger)length",
            "setBytes:(const void*)bytes length:(int)length",
            "-[MTLComputeCommandEncoder setBytes:length:atIndex:]: encoding",
        ),
        (
            "- (void)setBytes:(const void*)bytes",
            "- (void)setBytes:(void*)bytes",
            "-[MTLComputeCommandEncoder setBytes:length:atIndex:]: encoding",
        ),
        ("MTLMathModeFast = 2", "MTLMathModeFast = 1", "enum MTLMathModeFast: 1, Apple's is 2"),
        ("MTLMathModeFast = 2", "MTLMathModeQuick = 2", "enum MTLMathModeQuick: not in Apple's metadata"),
        (
            "- (BOOL)supportsFamily:(MTLGPUFamily)gpuFamily",
            "- (BOOL)supportsFamily:(unsigned)gpuFamily",
            "-[MTLDevice supportsFamily:]: argument 0 is I, Apple's is q",
        ),
        ("MTLSize maxThreadsPerThreadgroup", "NSUInteger maxThreadsPerThreadgroup", "-[MTLDevice maxThreadsPer"),
        (
            "NSErrorDomain const MTLLibraryErrorDomain",
            "NSErrorDomain const MTLShaderErrorDomain",
            "constant MTLShaderErrorDomain: not in Apple's metadata",
        ),
    ],
)
def test_a_deliberate_mistake_is_reported(
    apple: api_metadata.Metadata, headers: Path, before: str, after: str, report: str
) -> None:
    problems = api_check.check_declarations(spoil(headers, before, after), apple).problems
    assert len(problems) == 1
    assert problems[0].startswith(report)


def test_an_invented_method_does_not_pass_silently(apple: api_metadata.Metadata, headers: Path) -> None:
    declared = spoil(headers, "- (void*)contents;", "- (void*)contents;\n- (void)poke:(int)value;")
    report = api_check.check_declarations(declared, apple)
    assert report.unverified - UNVERIFIED == {"-[MTLBuffer poke:]"}


def test_sent_selectors_and_classes_are_compared(tmp_path: Path, apple: api_metadata.Metadata) -> None:
    """Compiles an object for macOS that uses one selector and one class that Apple's headers do not declare."""
    declared = api_check.declarations()
    good = "@class MTLCompileOptions; @interface MTLCompileOptions + (id)alloc; - (void)setMathMode:(long)m; @end\n"
    body = "void f(void) { [[MTLCompileOptions alloc] setMathMode:0]; }\n"
    assert api_check.check_sent([compile_for_mac(tmp_path / "good.m", good + body)], declared).problems == []
    bad = good.replace("setMathMode", "setMathsMode") + "@interface MTLNothing + (id)alloc; @end\n"
    body = "void f(void) { [[MTLCompileOptions alloc] setMathsMode:0]; [MTLNothing alloc]; }\n"
    assert api_check.check_sent([compile_for_mac(tmp_path / "bad.m", bad + body)], declared).problems == [
        "bad.o: sends setMathsMode:, which the checked headers do not declare",
        "bad.o: uses class MTLNothing, which the checked headers do not declare",
    ]


def compile_for_mac(path: Path, source: str) -> Path:
    path.write_text(source)
    return api_check.compile_for_mac(path, path.with_suffix(".o"), [])


def test_a_file_that_is_not_the_pinned_one_is_refused(
    apple: api_metadata.Metadata, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheels, "CACHE", tmp_path)
    pinned = dataclasses.replace(wheels.WHEELS["pyobjc-metal"], sha256="0" * 64)
    monkeypatch.setitem(wheels.WHEELS, "pyobjc-metal", pinned)
    with pytest.raises(wheels.WheelUnavailable, match="does not have the pinned sha256 0000"):
        wheels.fetch("pyobjc-metal")
