#include "json.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Far deeper than any scenario, and shallow enough that a broken file cannot exhaust the stack. */
enum { MAX_DEPTH = 64 };

typedef struct {
    const char *start;
    const char *at;
    const char *end;
    const char *reason; /* the first thing that went wrong, or NULL */
    int depth;
} parser;

static bool parse_value(parser *p, json *out);

static bool fail(parser *p, const char *reason)
{
    if (p->reason == NULL)
        p->reason = reason;
    return false;
}

/* The next character, or 0 at the end of the text. */
static char peek(const parser *p)
{
    return p->at < p->end ? *p->at : '\0';
}

static bool accept(parser *p, char wanted)
{
    if (peek(p) != wanted)
        return false;
    p->at++;
    return true;
}

static void skip_space(parser *p)
{
    while (p->at < p->end && (*p->at == ' ' || *p->at == '\t' || *p->at == '\n' || *p->at == '\r'))
        p->at++;
}

static bool parse_word(parser *p, const char *word)
{
    size_t length = strlen(word);
    if ((size_t)(p->end - p->at) < length || memcmp(p->at, word, length) != 0)
        return fail(p, "unknown word");
    p->at += length;
    return true;
}

/* ---- numbers ---- */

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

static double power_of_ten(int exponent)
{
    double power = 1;
    while (exponent-- > 0)
        power *= 10;
    return power;
}

/* Done by hand, because strtod() follows the locale and would read "1.5" as 1 in a process that
 * asked for a decimal comma. */
static bool parse_number(parser *p, json *out)
{
    bool negative = accept(p, '-');
    double mantissa = 0;
    unsigned long long integer = 0;
    bool exact = !negative;
    int exponent = 0;

    if (!is_digit(peek(p)))
        return fail(p, "expected a value");
    if (peek(p) == '0' && p->at + 1 < p->end && is_digit(p->at[1]))
        return fail(p, "a number starts with a needless zero");
    for (; is_digit(peek(p)); p->at++) {
        unsigned digit = (unsigned)(*p->at - '0');
        if (integer > (ULLONG_MAX - digit) / 10)
            exact = false;
        integer = integer * 10 + digit;
        mantissa = mantissa * 10 + digit;
    }
    if (accept(p, '.')) {
        exact = false;
        if (!is_digit(peek(p)))
            return fail(p, "expected a digit after the decimal point");
        for (; is_digit(peek(p)); p->at++, exponent--)
            mantissa = mantissa * 10 + (*p->at - '0');
    }
    if (peek(p) == 'e' || peek(p) == 'E') {
        p->at++;
        exact = false;
        bool down = accept(p, '-');
        if (!down)
            (void)accept(p, '+');
        if (!is_digit(peek(p)))
            return fail(p, "expected a digit in the exponent");
        int shift = 0;
        for (; is_digit(peek(p)); p->at++)
            if (shift < 400) /* already beyond what a double can hold */
                shift = shift * 10 + (*p->at - '0');
        exponent += down ? -shift : shift;
    }

    out->type = JSON_NUMBER;
    out->number = exponent < 0 ? mantissa / power_of_ten(-exponent)
                               : mantissa * power_of_ten(exponent);
    if (negative)
        out->number = -out->number;
    out->is_integer = exact;
    out->integer = exact ? integer : 0;
    return true;
}

/* ---- strings ---- */

static int hex_value(char c)
{
    if (is_digit(c))
        return c - '0';
    if (c >= 'a' && c <= 'f')
        return c - 'a' + 10;
    if (c >= 'A' && c <= 'F')
        return c - 'A' + 10;
    return -1;
}

static bool parse_hex4(parser *p, unsigned *out)
{
    *out = 0;
    for (int i = 0; i < 4; i++, p->at++) {
        int digit = hex_value(peek(p));
        if (digit < 0)
            return fail(p, "expected four hex digits after \\u");
        *out = *out * 16 + (unsigned)digit;
    }
    return true;
}

static bool parse_code_point(parser *p, unsigned *out)
{
    unsigned low;

    if (!parse_hex4(p, out))
        return false;
    if (*out >= 0xD800 && *out <= 0xDBFF) {
        if (!accept(p, '\\') || !accept(p, 'u') || !parse_hex4(p, &low) || low < 0xDC00
            || low > 0xDFFF)
            return fail(p, "half of a surrogate pair");
        *out = 0x10000 + ((*out - 0xD800) << 10) + (low - 0xDC00);
    } else if (*out >= 0xDC00 && *out <= 0xDFFF) {
        return fail(p, "half of a surrogate pair");
    }
    if (*out == 0)
        return fail(p, "a NUL inside a string");
    return true;
}

static char *append_utf8(char *to, unsigned code)
{
    if (code < 0x80) {
        *to++ = (char)code;
    } else if (code < 0x800) {
        *to++ = (char)(0xC0 | code >> 6);
        *to++ = (char)(0x80 | (code & 0x3F));
    } else if (code < 0x10000) {
        *to++ = (char)(0xE0 | code >> 12);
        *to++ = (char)(0x80 | (code >> 6 & 0x3F));
        *to++ = (char)(0x80 | (code & 0x3F));
    } else {
        *to++ = (char)(0xF0 | code >> 18);
        *to++ = (char)(0x80 | (code >> 12 & 0x3F));
        *to++ = (char)(0x80 | (code >> 6 & 0x3F));
        *to++ = (char)(0x80 | (code & 0x3F));
    }
    return to;
}

/* Decodes the character after a backslash; returns the new end of the string, or NULL. */
static char *parse_escape(parser *p, char *to)
{
    unsigned code;
    char c = peek(p);

    p->at++;
    switch (c) {
    case '"':
    case '\\':
    case '/':
        *to++ = c;
        return to;
    case 'b':
        *to++ = '\b';
        return to;
    case 'f':
        *to++ = '\f';
        return to;
    case 'n':
        *to++ = '\n';
        return to;
    case 'r':
        *to++ = '\r';
        return to;
    case 't':
        *to++ = '\t';
        return to;
    case 'u':
        return parse_code_point(p, &code) ? append_utf8(to, code) : NULL;
    default:
        fail(p, "unknown escape in a string");
        return NULL;
    }
}

/* Returns the decoded text, which the caller frees, or NULL. */
static char *parse_text(parser *p)
{
    if (!accept(p, '"')) {
        fail(p, "expected a string");
        return NULL;
    }

    /* Decoding never lengthens the text, so the raw length is room enough. */
    const char *close = p->at;
    while (close < p->end && *close != '"')
        close += *close == '\\' ? 2 : 1;
    if (close >= p->end) {
        fail(p, "a string that does not end");
        return NULL;
    }
    char *text = malloc((size_t)(close - p->at) + 1);
    if (text == NULL) {
        fail(p, "out of memory");
        return NULL;
    }

    char *to = text;
    while (p->at < close) {
        if ((unsigned char)*p->at < 0x20) {
            fail(p, "a control character inside a string");
            to = NULL;
        } else if (accept(p, '\\')) {
            to = parse_escape(p, to);
        } else {
            *to++ = *p->at++;
        }
        if (to == NULL) {
            free(text);
            return NULL;
        }
    }
    *to = '\0';
    p->at = close + 1;
    return text;
}

/* ---- arrays and objects ---- */

/* Elements and members alike; an object's have a key in front. */
static bool parse_children(parser *p, json *out, char close)
{
    json **tail = &out->first;

    if (++p->depth > MAX_DEPTH)
        return fail(p, "nested too deeply");
    p->at++; /* the opening bracket */
    skip_space(p);
    if (!accept(p, close)) {
        do {
            json *child = calloc(1, sizeof *child);
            if (child == NULL)
                return fail(p, "out of memory");
            /* Linked in before it is filled, so that json_free() reaches it after a failure. */
            *tail = child;
            tail = &child->next;
            out->count++;

            skip_space(p);
            if (out->type == JSON_OBJECT) {
                child->key = parse_text(p);
                if (child->key == NULL)
                    return false;
                skip_space(p);
                if (!accept(p, ':'))
                    return fail(p, "expected ':'");
                skip_space(p);
            }
            if (!parse_value(p, child))
                return false;
            skip_space(p);
        } while (accept(p, ','));
        if (!accept(p, close))
            return fail(p, close == ']' ? "expected ',' or ']'" : "expected ',' or '}'");
    }
    p->depth--;
    return true;
}

static bool parse_value(parser *p, json *out)
{
    switch (peek(p)) {
    case '{':
        out->type = JSON_OBJECT;
        return parse_children(p, out, '}');
    case '[':
        out->type = JSON_ARRAY;
        return parse_children(p, out, ']');
    case '"':
        out->type = JSON_STRING;
        out->string = parse_text(p);
        return out->string != NULL;
    case 't':
        out->type = JSON_BOOL;
        out->boolean = true;
        return parse_word(p, "true");
    case 'f':
        out->type = JSON_BOOL;
        return parse_word(p, "false");
    case 'n':
        return parse_word(p, "null");
    default:
        return parse_number(p, out);
    }
}

json *json_parse(const char *text, size_t length, char *error, size_t error_size)
{
    parser p = {.start = text, .at = text, .end = text + length};
    json *root = calloc(1, sizeof *root);

    if (root == NULL) {
        snprintf(error, error_size, "out of memory");
        return NULL;
    }
    skip_space(&p);
    if (parse_value(&p, root)) {
        skip_space(&p);
        if (p.at == p.end)
            return root;
        fail(&p, "something follows the document");
    }

    unsigned line = 1;
    for (const char *c = p.start; c < p.at && c < p.end; c++)
        line += *c == '\n';
    snprintf(error, error_size, "line %u: %s", line, p.reason);
    json_free(root);
    return NULL;
}

void json_free(json *value)
{
    while (value != NULL) {
        json *next = value->next;
        json_free(value->first);
        free(value->string);
        free(value->key);
        free(value);
        value = next;
    }
}

/* ---- looking things up ---- */

static const json *member_named(const json *object, const char *key, size_t length)
{
    if (object == NULL || object->type != JSON_OBJECT)
        return NULL;
    for (const json *member = object->first; member != NULL; member = member->next)
        if (strncmp(member->key, key, length) == 0 && member->key[length] == '\0')
            return member;
    return NULL;
}

const json *json_member(const json *object, const char *key)
{
    return member_named(object, key, strlen(key));
}

const json *json_path(const json *object, const char *path)
{
    for (;;) {
        size_t length = strcspn(path, ".");
        object = member_named(object, path, length);
        if (object == NULL || path[length] == '\0')
            return object;
        path += length + 1;
    }
}

const json *json_item(const json *array, size_t index)
{
    if (array == NULL || array->type != JSON_ARRAY)
        return NULL;
    const json *item = array->first;
    while (item != NULL && index-- > 0)
        item = item->next;
    return item;
}

bool json_is_null(const json *value)
{
    return value == NULL || value->type == JSON_NULL;
}
