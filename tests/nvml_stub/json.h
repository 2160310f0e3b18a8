/* A small JSON reader: text in, tree out. */

#ifndef NVML_STUB_JSON_H
#define NVML_STUB_JSON_H

#include <stdbool.h>
#include <stddef.h>

typedef enum {
    JSON_NULL,
    JSON_BOOL,
    JSON_NUMBER,
    JSON_STRING,
    JSON_ARRAY,
    JSON_OBJECT,
} json_type;

typedef struct json json;

struct json {
    json_type type;
    bool boolean;
    double number;
    /* The exact value of a number written as a plain non-negative integer: a double cannot hold
     * every byte count or energy counter. */
    bool is_integer;
    unsigned long long integer;
    char *string;
    char *key;   /* the member's name, when this value sits in an object */
    json *first; /* the first element or member, in file order */
    json *next;  /* the next sibling */
    size_t count;
};

/* Not exported: the library is loaded with its symbols global, among others that may use the same
 * names. */
#pragma GCC visibility push(hidden)

/* Reads one JSON document.  On failure returns NULL and puts a one-line reason into `error`. */
json *json_parse(const char *text, size_t length, char *error, size_t error_size);

void json_free(json *value);

/* These accept NULL, and return NULL where there is nothing of that name or number. */
const json *json_member(const json *object, const char *key);
const json *json_item(const json *array, size_t index);

/* Follows member names joined by dots: json_path(gpu, "memory.total"). */
const json *json_path(const json *object, const char *path);

/* True for NULL and for a JSON null alike: both mean "no such value". */
bool json_is_null(const json *value);

#pragma GCC visibility pop

#endif
